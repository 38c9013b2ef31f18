"""Share of the KV hand-over in the TTFT of long prompts, by the load on decode.

`python -m benchmarks.handover` runs a node that hands all prompts over. It sends new long prompts one at a time, while
a number of other answers are generated in the background. Times are medians of the node's own `timings`: prefill, the
hand-over (from the first token sampled in prefill until decode has reserved blocks and pulled the KV), and TTFT. Writes
handover.json and handover.md.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import table, write
from runtime.node.metrics.worker_metrics import DecodeMetrics
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.background import Background
from runtime.testing.node import Node, running
from runtime.testing.tiny_model import make_tiny_llama

CONFIG = """
[node]
name = "handover"
run_dir = "{run_dir}"
[http]
port = 0
[model]
name = "{model}"
[handover]
disaggregate = "always"
[kv]
host_mib = 0
"""
STAGES = ("prefill", "room", "pull", "handover", "ttft")


def request_body(model: str, random: np.random.Generator, tokens: int, max_tokens: int) -> dict[str, Any]:
    """Return a request with a new random prompt."""
    prompt = random.integers(100, 250, tokens).tolist()
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def generate_answers(node: Node, model: str, seed: int, until: Background) -> None:
    """Generate answers one at a time until the block ends."""
    random = np.random.default_rng(seed)
    while not until.ended.is_set():
        status, answer = node.post("/v1/completions", request_body(model, random, 16, 200))
        assert status == 200, answer


def measure_load(node: Node, model: str, rows: int, tokens: int, prompts: int) -> dict[str, list[float]]:
    """Return the times of each long prompt in seconds, with `rows` answers generated in the background."""
    random = np.random.default_rng(rows)
    times: dict[str, list[float]] = {name: [] for name in (*STAGES, "tpot")}

    def answers(number: int) -> Callable[[], None]:
        return lambda: generate_answers(node, model, 1000 + number, background)

    background = Background([answers(number) for number in range(rows)])
    with background:
        node.wait(lambda: node.metric(str(DecodeMetrics.RUNNING)) >= rows, what="all background answers to run")
        for _ in range(prompts):
            status, answer = node.post("/v1/completions", request_body(model, random, tokens, 8))
            assert status == 200, answer
            for name, values in times.items():
                values.append(answer["timings"][name])
    return times


def measure(model: str, tokens: int, prompts: int, rows: list[int]) -> list[dict[str, Any]]:
    """Measure all loads with one model."""
    with tempfile.TemporaryDirectory() as folder:
        if model == "tiny":
            model = str(make_tiny_llama(Path(folder) / model, layers=4, hidden=256))
        config = Path(folder) / "node.toml"
        config.write_text(CONFIG.format(run_dir=Path(folder) / "run", model=model))
        info = ModelInfo.read(model)
        with running(config) as node:
            times = {count: measure_load(node, info.name, count, tokens, prompts) for count in rows}
    found = []
    for count, values in times.items():
        median = {name: statistics.median(one) for name, one in values.items()}
        share = statistics.median(h / t for h, t in zip(values["handover"], values["ttft"], strict=True))
        found.append(
            {
                "model": info.name, "tokens": tokens, "bytes": info.kv_bytes_per_token() * tokens, "rows": count,
                "times": values, "share": share, **{f"{name}_s": value for name, value in median.items()},
            }
        )  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handover", description=__doc__)
    parser.add_argument("--model", nargs="+", default=["tiny", "smollm2-135m-instruct"])
    parser.add_argument("--tokens", type=int, default=1800)
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = machine_load()
    found = [one for model in options.model for one in measure(model, options.tokens, options.prompts, options.rows)]
    rows = [
        (
            one["model"], one["rows"], f"{one['bytes'] / 1e6:.0f}",
            *(f"{one[f'{name}_s'] * 1e3:.1f}" for name in ("tpot", *STAGES)), f"{one['share']:.1%}",
        )
        for one in found
    ]  # fmt: skip
    head = ("model", "answers beside it", "MB", "TPOT, ms", *STAGES, "hand-over of TTFT")
    lines = [f"Prompts of {options.tokens} tokens. {load}", "", *table(head, rows)]
    write({"machine": machine(), "load": load, "found": found}, "\n".join(lines), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
