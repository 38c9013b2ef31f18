"""Latency of prefill's texts in an embedding stage, alone and while decode floods it with probes, in alternation."""

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import uvloop

from benchmarks.common.report import table
from benchmarks.retrieval_load.stage import raw
from runtime.retrieval.embedding.embedder import Embedder
from runtime.retrieval.embedding.stage import EmbeddingStage

SHARE = 0.25  # of the raw embedder's rate: prefill's arrivals
_OUTSTANDING = 64  # probes
_SWITCH_S = 0.0005  # of the interpreter's lock, as in the frontend


@dataclass(frozen=True)
class Latencies:
    """Of prefill's texts, in ms, and probes/s."""

    p50_ms: float
    p99_ms: float
    probes: float


def measure_probes(
    model: Embedder, texts: Sequence[str], seconds: float, seed: int, rounds: int = 3
) -> dict[str, list[Latencies]]:
    """Return prefill's latencies by round, alone and beside probes."""
    sys.setswitchinterval(_SWITCH_S)
    cores = len(os.sched_getaffinity(0))
    rate = SHARE * raw(model, texts[: int(64 * seconds)], cores, 64).rate
    results: dict[str, list[Latencies]] = {"prefill alone": [], f"beside {_OUTSTANDING} probes at once": []}
    unused = iter(texts)
    for number in range(rounds):
        for way, outstanding in zip(results, (0, _OUTSTANDING), strict=True):
            results[way].append(_measured(model, unused, cores, rate, outstanding, seconds, seed + number))
    return results


def probes_table(results: dict[str, list[Latencies]]) -> list[str]:
    """Return the medians as a Markdown table; ratios round by round."""
    alone, rows = next(iter(results.values())), []
    for way, rounds in results.items():
        ratios = [one.p99_ms / of.p99_ms for one, of in zip(rounds, alone, strict=True)]
        figures = [[one.p50_ms for one in rounds], [one.p99_ms for one in rounds]]
        rows.append([
            way, *(f"{np.median(each):.1f}" for each in figures), f"{np.median(ratios):.2f}",
            f"{np.median([one.probes for one in rounds]):.0f}",
        ])  # fmt: skip
    return list(table([f"embedding at {SHARE:.0%} load", "p50 ms", "p99 ms", "of alone", "probes/s"], rows))


def _measured(
    model: Embedder, texts: Iterator[str], threads: int, rate: float, outstanding: int, seconds: float, seed: int
) -> Latencies:
    stage, arrivals = EmbeddingStage(threads), random.Random(seed)
    took: list[float] = []
    probes = 0
    until = time.perf_counter() + seconds

    async def ask(due: float) -> None:
        await asyncio.wrap_future(stage.submit(model, [next(texts)], part="prefill"))
        took.append(time.perf_counter() - due)

    async def probe() -> None:
        nonlocal probes
        while time.perf_counter() < until:
            await asyncio.wrap_future(stage.submit(model, [next(texts)], part="decode"))
            probes += 1

    async def run() -> None:
        await ask(time.perf_counter())
        took.clear()
        flood = [asyncio.create_task(probe()) for _ in range(outstanding)]
        asked, due = [], time.perf_counter()
        while (due := due + arrivals.expovariate(rate)) < until:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            asked.append(asyncio.create_task(ask(due)))
        await asyncio.gather(*asked, *flood)

    try:
        uvloop.run(run())
    finally:
        stage.close()
    p50_s, p99_s = np.quantile(took, (0.5, 0.99))
    return Latencies(p50_s * 1e3, p99_s * 1e3, probes / seconds)
