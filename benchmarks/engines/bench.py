"""A node in front of a server: its overhead, and its fault tolerance.

`python -m benchmarks.engines --config gateway.toml` starts the configured node and compares it with its server
(`overhead.py`): with `engine = "openai"` the first of its URLs, where a server must be running, with `engine = "vllm"`
the node's first instance, at its socket. `--only` selects measures.

`--apart split.toml` compares the node with a second one that has separate prefill and decode instances (`layouts.py`).
`--kills` kills every part of the node's vLLM under load (`kills.py`), and exits with 1 if anything is lost or left.

Writes engines.json and engines.md; engines-apart and engines-kills.
"""

import argparse
import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import write
from benchmarks.engines import kills, layouts, overhead
from benchmarks.engines.targets import Targets, node_of, server_of
from runtime.node.config import NodeConfig
from runtime.node.config_file import load_config
from runtime.node.engine_config import ServedSection, VllmSection
from runtime.testing.node import Node, running

Json = dict[str, Any]


def load_served(path: Path) -> tuple[NodeConfig, ServedSection]:
    """Load a configuration and its `[model]`. Exits if the node runs its own model."""
    config = load_config(path)
    if not isinstance(config.model, ServedSection):
        sys.exit(f'{path}: [model] has neither engine = "openai" nor engine = "vllm"')
    return config, config.model


def measure_overhead(options: argparse.Namespace, node: Node) -> Json:
    """See `overhead.py`."""
    config, section = load_served(options.config)
    collection = config.collections[0] if config.collections else None

    async def measured() -> Json:
        addresses = {"direct": server_of(node, section), "through": node_of(node)}
        async with Targets(addresses, section.name, options.seed, salted=isinstance(section, VllmSection)) as targets:
            return await overhead.measure(
                targets, collection, section,
                only=options.only, pairs=options.pairs, rounds=options.rounds, tokens=options.tokens,
            )  # fmt: skip

    return asyncio.run(measured())


def compare_layouts(options: argparse.Namespace, node: Node, split: Node) -> Json:
    """See `layouts.py`."""
    _, section = load_served(options.config)

    async def measured() -> Json:
        addresses = {"direct": server_of(node, section), "together": node_of(node), "apart": node_of(split)}
        async with Targets(addresses, section.name, options.seed, salted=isinstance(section, VllmSection)) as targets:
            return await layouts.compare(
                targets, rounds=options.rounds, tokens=options.tokens, prompt_tokens=options.prompt_tokens
            )

    return asyncio.run(measured())


def command_of(options: argparse.Namespace) -> str:
    """Return the command line for the report."""
    words = ["python -m benchmarks.engines", "--config", options.config.name]
    words += ["--apart", options.apart.name] if options.apart else []
    words += ["--kills", f"--streams {options.streams}"] if options.kills else []
    return " ".join([*words, f"--tokens {options.tokens}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help='a node with engine = "openai" or "vllm"')
    parser.add_argument("--server", default="", help="description of the server, for the report")
    parser.add_argument("--only", action="append", choices=overhead.MEASURES, help="run only this measure (repeatable)")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=400, help="for --apart")
    parser.add_argument("--streams", type=int, default=25, help="for --kills, per kill")
    parser.add_argument("--apart", type=Path, help="a node with [model.prefill] and [model.decode]")
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.only = options.only or overhead.MEASURES
    _, section = load_served(options.config)
    before, name = machine_load(), "engines"
    with ExitStack() as nodes:
        node = nodes.enter_context(running(options.config, "--quiet"))
        if options.apart:
            split = nodes.enter_context(running(options.apart, "--quiet"))
            found, title, name = (
                compare_layouts(options, node, split),
                "vLLM with combined and separate prefill and decode",
                "engines-apart",
            )
            lines = layouts.report(found)
        elif options.kills:
            found = kills.kills(kills.Target.of(node), section.name, streams=options.streams, tokens=options.tokens)
            title, lines, name = "Kills of vLLM's processes", kills.report(found), "engines-kills"
        else:
            found, title = measure_overhead(options, node), "A node in front of a server"
            lines = overhead.report(found)
    found |= {
        "command": command_of(options), "server": options.server,
        "machine": machine(), "load_before": before, "load_after": machine_load(), "seed": options.seed,
    }  # fmt: skip
    head = [
        f"# {title}", "", f"`{found['command']}`, server: {found['server'] or 'unspecified'}",
        f"Machine: {found['machine']['processor']}, {found['machine']['cores']} cores; {before} before, "
        f"{found['load_after']} after.", "",
    ]  # fmt: skip
    write(found, "\n".join([*head, *lines]), options.out / name)
    return int(bool(options.kills and (found["lost"] or found["left"] or found["hang"])))


if __name__ == "__main__":
    sys.exit(main())
