"""A node in front of a server: its overhead.

`python -m benchmarks.engines --config gateway.toml` starts the configured node and compares it with its server
(`overhead.py`): with `engine = "openai"` the first of its URLs, where a server must be running, with `engine = "vllm"`
the node's first instance, at its socket. `--only` selects measures.

Writes engines.json and engines.md.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import write
from benchmarks.engines import overhead
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
                targets, collection,
                only=options.only, pairs=options.pairs, rounds=options.rounds, tokens=options.tokens,
            )  # fmt: skip

    return asyncio.run(measured())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help='a node with engine = "openai" or "vllm"')
    parser.add_argument("--server", default="", help="description of the server, for the report")
    parser.add_argument("--only", action="append", choices=overhead.MEASURES, help="run only this measure (repeatable)")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.only = options.only or overhead.MEASURES
    before = machine_load()
    with running(options.config, "--quiet") as node:
        found = measure_overhead(options, node)
    found |= {
        "command": f"python -m benchmarks.engines --config {options.config.name} --tokens {options.tokens}",
        "server": options.server, "machine": machine(), "load_before": before, "load_after": machine_load(),
        "seed": options.seed,
    }  # fmt: skip
    head = [
        "# A node in front of a server", "", f"`{found['command']}`, server: {found['server'] or 'unspecified'}",
        f"Machine: {found['machine']['processor']}, {found['machine']['cores']} cores; {before} before, "
        f"{found['load_after']} after.", "",
    ]  # fmt: skip
    write(found, "\n".join([*head, *overhead.report(found)]), options.out / "engines")


if __name__ == "__main__":
    main()
