"""Steady load on a node: generations with probes and searches, until the context ends."""

import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from runtime.testing.background import Background
from runtime.testing.node import Node
from runtime.testing.waiting import eventually

GENERATE: dict[str, Any] = {
    "model": "tiny",
    "prompt": "how does a with statement call __exit__?",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "retrieval": {"collection": "docs", "k": 2, "every_tokens": 8},
}
START_S = 240.0  # bounds a wait that would never end, not a start on a busy machine
SEARCH = {"query": "the with statement", "collection": "docs", "k": 3}
WAIT_S = 120.0
R = TypeVar("R")


def prompts(count: int) -> Iterator[str]:
    """Yield distinct short questions."""
    for number in range(count):
        yield f"question {number}: how does a with statement call __exit__?"


@contextmanager
def load(node: Node, searchers: int = 4, generators: int = 1) -> Iterator[Counter[int]]:
    """Run the load, of searches for different texts; yield the counts of answers by status."""
    answers: Counter[int] = Counter()
    numbers = itertools.count()

    def ask(path: str, body: Callable[[], dict[str, Any]]) -> None:
        while not asking.ended.wait(0.1):
            status, _ = node.post(path, body())
            answers[status] += 1

    searching = partial(ask, "/v1/retrieval", lambda: SEARCH | {"query": f"{SEARCH['query']} {next(numbers)}"})
    generating = partial(ask, "/v1/completions", lambda: GENERATE)
    asking = Background([searching] * searchers + [generating] * generators)
    with asking:
        yield answers


@contextmanager
def repeated(
    ask: Callable[[dict[str, Any]], R], bodies: Sequence[dict[str, Any]]
) -> Iterator[list[list[R | Exception]]]:
    """Ask with each body again and again until the block ends, so that requests are in flight at any moment of it.

    Yields the answers to each body, which are complete after the block.
    """
    answers: list[list[R | Exception]] = [[] for _ in bodies]

    def run(number: int) -> None:
        while not asking.ended.is_set():
            try:
                answers[number].append(ask(bodies[number]))
            except Exception as error:
                answers[number].append(error)

    asking = Background([partial(run, number) for number in range(len(bodies))])
    with asking:
        yield answers


def wait_for_more(answers: Counter[int], count: int) -> None:
    """Wait until more than `count` further answers have status 200."""
    before = answers[200]
    eventually(lambda: answers[200] > before + count, WAIT_S, f"{count} answers more")


@contextmanager
def slowed(pid: int, stopped_s: float, running_s: float = 0.05) -> Iterator[None]:
    """Slow a process down by stopping it most of the time."""
    ended = threading.Event()

    def pump() -> None:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            ended.wait(stopped_s)
            os.kill(pid, signal.SIGCONT)
            ended.wait(running_s)

    pumping = threading.Thread(target=pump, daemon=True)
    pumping.start()
    try:
        yield
    finally:
        ended.set()
        pumping.join(timeout=30)
        os.kill(pid, signal.SIGCONT)
