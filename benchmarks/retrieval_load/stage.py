"""The embedding stage without a node, beside the raw embedder: the same texts, in alternation, submitted by an event
loop as the frontend does."""

import asyncio
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.common.report import table
from runtime.retrieval.embedding.embedder import Embedder, TextKind
from runtime.retrieval.embedding.stage import EmbeddingStage

_BATCH = 64


@dataclass(frozen=True)
class Measured:
    """Texts/s, and milliseconds of processor time a text, of this process."""

    rate: float
    cpu_ms: float


def measure_stage(model: Embedder, texts: Sequence[str], rounds: int = 3) -> dict[str, list[Measured]]:
    """Return what each way of embedding took, by round. The first texts are embedded one by one."""
    cores, few = len(os.sched_getaffinity(0)), texts[: len(texts) // 8]
    ways: dict[str, Callable[[], Measured]] = {
        "raw, one by one": lambda: raw(model, few, 1, 1),
        "stage, one query at a time": lambda: _stage(model, few, cores, 1, 1),
        f"raw, batches of {_BATCH} on {cores} threads": lambda: raw(model, texts, cores, _BATCH),
        "stage, 64 queries at once": lambda: _stage(model, texts, cores, 64, 1),
        "stage, 256 queries at once": lambda: _stage(model, texts, cores, 256, 1),
        f"stage, lists of {_BATCH}, one at a time": lambda: _stage(model, texts, cores, 1, _BATCH),
        f"stage, lists of {_BATCH}, four at once": lambda: _stage(model, texts, cores, 4, _BATCH),
    }
    results: dict[str, list[Measured]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, measure in ways.items():
            results[way].append(measure())
    return results


def stage_table(results: dict[str, list[Measured]]) -> list[str]:
    """Return the medians as a Markdown table; the raw way above a row is its measure, round by round."""
    rows = []
    raw: list[Measured] = []
    for way, rounds in results.items():
        raw = rounds if way.startswith("raw") else raw
        pairs = list(zip(rounds, raw, strict=True))
        rows.append([
            way, f"{statistics.median(one.rate for one in rounds):.0f}",
            f"{statistics.median(one.rate / of.rate for one, of in pairs):.2f}",
            f"{statistics.median(one.cpu_ms for one in rounds):.2f}",
            f"{statistics.median(one.cpu_ms / of.cpu_ms for one, of in pairs):.2f}",
        ])  # fmt: skip
    return list(table(["embedding", "texts/s", "of raw", "processor ms a text", "of raw"], rows))


def raw(model: Embedder, texts: Sequence[str], threads: int, batch: int, kind: TextKind = "query") -> Measured:
    """Embed batches on threads."""
    batches = iter([texts[begin : begin + batch] for begin in range(0, len(texts), batch)])

    def embed() -> None:
        while (own := next(batches, None)) is not None:
            model.embed(own, kind)

    def run() -> None:
        running = [threading.Thread(target=embed) for _ in range(threads)]
        for one in running:
            one.start()
        for one in running:
            one.join()

    return measured(run, len(texts))


def _stage(model: Embedder, texts: Sequence[str], threads: int, outstanding: int, each: int) -> Measured:
    stage = EmbeddingStage(threads)
    calls: Iterator[Sequence[str]] = iter([texts[begin : begin + each] for begin in range(0, len(texts), each)])

    async def client() -> None:
        for own in calls:
            await asyncio.wrap_future(stage.submit(model, own, part="prefill" if each == 1 else "bulk"))

    async def clients() -> None:
        await asyncio.gather(*itertools.starmap(client, [()] * outstanding))

    try:
        return measured(lambda: uvloop.run(clients()), len(texts))
    finally:
        stage.close()


def measured(run: Callable[[], object], count: int) -> Measured:
    """Run a function that embeds `count` texts."""
    begin, cpu = time.perf_counter(), time.process_time()
    run()
    return Measured(count / (time.perf_counter() - begin), (time.process_time() - cpu) / count * 1e3)
