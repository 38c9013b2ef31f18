"""TTFT of a prompt after its workers were killed: KV loaded from a tier, compared with a new prompt.

`python -m benchmarks.kv_tiers` runs a node with a host tier. Each round sends a prompt (its KV is computed and written
to the tier), kills the prefill and the decode worker, and sends that prompt again and a new one of the same length, in
alternating order. Times to the first token are measured by the client; the answers before and after must be the same
tokens. Writes kv-tiers.json and kv-tiers.md.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import machine_load
from benchmarks.common.report import table, write
from runtime.node.metrics.worker_metrics import DecodeMetrics, PrefillMetrics
from runtime.testing.node import Node, running
from runtime.testing.tiny_model import make_tiny_llama

CONFIG = """
[node]
name = "kv-tiers"
run_dir = "{run_dir}"
[http]
port = 0
[model]
name = "{model}"
[handover]
disaggregate = "{disaggregate}"
"""


def visit(node: Node, model: str, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the seconds of a one-token answer, and the tokens of a longer answer."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    begin = time.perf_counter()
    status, answer = node.post("/v1/completions", body | {"max_tokens": 1})
    took_s = time.perf_counter() - begin
    assert status == 200, answer
    status, answer = node.post("/v1/completions", body | {"max_tokens": 16})
    assert status == 200, answer
    return took_s, answer["choices"][0]["token_ids"]


def run_round(node: Node, model: str, tokens: int, number: int) -> dict[str, float]:
    """Run one round. Return its times to the first token in seconds."""
    known, fresh = np.random.default_rng(number).integers(100, 250, (2, tokens)).tolist()
    first_s, before = visit(node, model, known)
    node.wait_idle()
    for worker in ("prefill-0", "decode-0"):
        node.kill(worker)
    node.wait_ready()
    times, prompts = {"first": first_s}, [("loaded", known), ("computed", fresh)]
    for name, prompt in prompts if number % 2 else reversed(prompts):
        times[name], answer = visit(node, model, prompt)
        assert name != "loaded" or answer == before, "the answer is the same as before the kill"
    return times


def measure(model: str, tokens: int, rounds: int, disaggregate: str) -> dict[str, Any]:
    """Run all rounds with one model."""
    with tempfile.TemporaryDirectory() as folder:
        if model == "tiny":
            model = str(make_tiny_llama(Path(folder) / model, layers=4, hidden=256))
        config = Path(folder) / "node.toml"
        config.write_text(CONFIG.format(run_dir=Path(folder) / "run", model=model, disaggregate=disaggregate))
        with running(config) as node:
            found = [run_round(node, Path(model).name, tokens, number) for number in range(rounds)]
            loaded = sum(node.metric(str(m.TIER_LOADED), tier="host") for m in (PrefillMetrics, DecodeMetrics)) / 2
    median = {name: statistics.median(one[name] for one in found) for name in found[0]}
    ratio = statistics.median(one["loaded"] / one["computed"] for one in found)
    return {
        "model": Path(model).name, "tokens": tokens, "disaggregate": disaggregate, "rounds": found,
        "loaded_blocks": loaded, "ratio": ratio, **{f"{name}_s": value for name, value in median.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_tiers", description=__doc__)
    parser.add_argument("--model", nargs="+", default=["tiny", "smollm2-135m-instruct"])
    parser.add_argument("--tokens", type=int, default=1300)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--disaggregate", nargs="+", default=["always", "never"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = machine_load()
    found = [
        measure(model, options.tokens, options.rounds, way) for model in options.model for way in options.disaggregate
    ]
    rows = [
        (
            one["model"], "prefill" if one["disaggregate"] == "always" else "decode", one["tokens"],
            f"{one['first_s'] * 1e3:.0f}", f"{one['computed_s'] * 1e3:.0f}", f"{one['loaded_s'] * 1e3:.0f}",
            f"{one['ratio']:.2f}",
        )
        for one in found
    ]  # fmt: skip
    head = ("model", "computed by", "tokens", "first visit, ms", "after a kill: another prompt", "the same", "ratio")
    write({"load": load, "found": found}, "\n".join([load, "", *table(head, rows)]), options.out)
    return 0 if all(one["ratio"] <= 0.3 for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
