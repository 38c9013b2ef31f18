"""What the hand-over of a long prompt's KV is of the time to its first token, by how busy decode is.

`python -m benchmarks.handover` runs a node whose prompts are all handed over. Long prompts that nobody has seen come
one after the other, while so many answers are being written; times are the node's own (`timings`), medians: from the
first token drawn in prefill until decode has found room and pulled the KV, beside prefill and all of TTFT. Writes
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


def asked(model: str, random: np.random.Generator, tokens: int, most: int) -> dict[str, Any]:
    """A prompt that nobody has seen."""
    prompt = random.integers(100, 250, tokens).tolist()
    return {"model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}


def busy(node: Node, model: str, seed: int, until: Background) -> None:
    """One answer after the other, until the block ends."""
    random = np.random.default_rng(seed)
    while not until.ended.is_set():
        status, answer = node.post("/v1/completions", asked(model, random, 16, 200))
        assert status == 200, answer


def beside(node: Node, model: str, rows: int, tokens: int, prompts: int) -> dict[str, list[float]]:
    """Each long prompt's times in seconds, beside so many answers."""
    random = np.random.default_rng(rows)
    found: dict[str, list[float]] = {name: [] for name in (*STAGES, "tpot")}

    def answers(number: int) -> Callable[[], None]:
        return lambda: busy(node, model, 1000 + number, background)

    background = Background([answers(number) for number in range(rows)])
    with background:
        node.wait(lambda: node.metric(str(DecodeMetrics.RUNNING)) >= rows, what="all answers to be written")
        for _ in range(prompts):
            status, answer = node.post("/v1/completions", asked(model, random, tokens, 8))
            assert status == 200, answer
            for name, values in found.items():
                values.append(answer["timings"][name])
    return found


def measure(model: str, tokens: int, prompts: int, rows: list[int]) -> list[dict[str, Any]]:
    """All loads of one model."""
    with tempfile.TemporaryDirectory() as folder:
        if model == "tiny":
            model = str(make_tiny_llama(Path(folder) / model, layers=4, hidden=256))
        config = Path(folder) / "node.toml"
        config.write_text(CONFIG.format(run_dir=Path(folder) / "run", model=model))
        info = ModelInfo.read(model)
        with running(config) as node:
            times = {count: beside(node, info.name, count, tokens, prompts) for count in rows}
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
