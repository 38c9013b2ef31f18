"""Chats with retrieval, some at a time, and what embedding is of their time to the first token."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common.report import table
from runtime.testing.node import Node

CONCURRENT = 16
_STAGES = ("queue", "batch", "embed", "retrieval", "passages", "admission", "prefill")


@dataclass(frozen=True)
class Chats:
    """Seconds by stage of every chat, with "ttft"."""

    seconds: list[dict[str, float]]

    def share(self, *stages: str) -> float:
        """Return what stages are of the first tokens' times, all chats together."""
        return sum(one.get(stage, 0.0) for one in self.seconds for stage in stages) / sum(
            one["ttft"] for one in self.seconds
        )


def measure_chats(node: Node, model: str, questions: Sequence[str], each: int) -> Chats:
    """Have every client ask `each` questions, one after another."""
    unused: Iterator[str] = iter(questions)
    timings: list[dict[str, float]] = []
    lock = threading.Lock()

    def client() -> None:
        for _ in range(each):
            with lock:
                content = next(unused)
            body = {
                "model": model, "max_tokens": 4, "messages": [{"role": "user", "content": content}],
                "retrieval": {"collection": "docs", "k": 4},
            }  # fmt: skip
            status, answer = node.post("/v1/chat/completions", body)
            assert status == 200, answer
            with lock:
                timings.append(answer["timings"])

    clients = [threading.Thread(target=client) for _ in range(CONCURRENT)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return Chats(timings)


def chats_table(chats: Chats) -> list[str]:
    """Return the stages to the first token as a Markdown table."""
    rows = [
        (stage, f"{np.median([one.get(stage, 0.0) for one in chats.seconds]) * 1e3:.1f}", f"{chats.share(stage):.1%}")
        for stage in (*_STAGES, "ttft")
    ]
    rows.append(("batch and embed", "", f"{chats.share('batch', 'embed'):.1%}"))
    return list(table([f"{CONCURRENT} chats at a time, {len(chats.seconds)} in all", "p50 ms", "of TTFT"], rows))
