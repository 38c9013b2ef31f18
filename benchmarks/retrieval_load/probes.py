"""Latency of prefill's texts alone and while decode floods the embedder with probes, in alternation.

Which process embeds what depends on the engine. A node with its own has prefill and decode workers: each leads a
session and embeds its own texts, on one thread if no cores are configured (`runtime.serving.kv_worker`). In front of
another engine the frontend embeds both in one stage, on as many threads as it has cores.
"""

import asyncio
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import uvloop

from benchmarks.common.report import table
from benchmarks.retrieval_load.stage import raw
from runtime.retrieval.embedding.embedder import Embedder
from runtime.retrieval.embedding.loading import load_embedder
from runtime.retrieval.embedding.stage import EmbeddingStage

SHARE = 0.25  # of the raw rate of the threads that embed prefill's texts: their arrivals
_OUTSTANDING = 64  # probes
_FRONTEND_SWITCH_S = 0.0005  # of the interpreter's lock; workers keep Python's 5 ms
_WAIT_S = 60.0

Flood = Callable[[EmbeddingStage, float], Awaitable[int]]
"""Has probes embedded until a time of `time.perf_counter`; returns their number. The stage is prefill's."""


class Latencies(NamedTuple):
    """Of prefill's texts, in ms, and probes/s."""

    p50_ms: float
    p99_ms: float
    probes: float


Rounds = dict[str, list[Latencies]]


def measure_probes(
    model: Embedder, texts: Sequence[str], seconds: float, seed: int, rounds: int = 5
) -> dict[str, Rounds]:
    """Return prefill's latencies in the workers of a node's own engine, and in the frontend of another engine."""
    cores, texts, probes = len(os.sched_getaffinity(0)), texts[::2], texts[1::2]
    measure = partial(_rounds, model, itertools.cycle(texts), seconds=seconds, seed=seed, rounds=rounds)
    with _decode_worker(model.name, probes) as flood:
        workers = measure(threads=1, flood=flood)
    sys.setswitchinterval(_FRONTEND_SWITCH_S)
    frontend = measure(threads=cores, flood=partial(_flood, model, itertools.cycle(probes)))
    return {"own engine": workers, "another engine": frontend}


def probes_table(results: dict[str, Rounds]) -> list[str]:
    """Return the medians as a Markdown table; ratios round by round."""
    rows = []
    for place, ways in results.items():
        alone = next(iter(ways.values()))
        for way, rounds in ways.items():
            ratios = [one.p99_ms / of.p99_ms for one, of in zip(rounds, alone, strict=True)]
            medians = np.median(rounds, axis=0)
            p50, p99, probes = (f"{median:.{digits}f}" for median, digits in zip(medians, (1, 1, 0), strict=True))
            rows.append((f"{place}, {way}", p50, p99, f"{np.median(ratios):.2f}", probes))
    return list(table([f"embedding at {SHARE:.0%} load", "p50 ms", "p99 ms", "of alone", "probes/s"], rows))


def _rounds(
    model: Embedder, texts: Iterator[str], *, threads: int, flood: Flood, seconds: float, seed: int, rounds: int
) -> Rounds:
    rate = SHARE * raw(model, list(itertools.islice(texts, int(64 * seconds))), threads, 64).rate
    ways: dict[str, Flood] = {"prefill alone": _no_flood, f"beside {_OUTSTANDING} probes at once": flood}
    results: Rounds = {way: [] for way in ways}
    for number in range(rounds):
        for way, beside in ways.items():
            results[way].append(_measured(model, texts, threads, rate, beside, seconds, seed + number))
    return results


def _measured(
    model: Embedder, texts: Iterator[str], threads: int, rate: float, flood: Flood, seconds: float, seed: int
) -> Latencies:
    """Measure prefill's texts, with Poisson arrivals."""
    stage, arrivals = EmbeddingStage(threads), random.Random(seed)
    took: list[float] = []

    async def ask(due: float) -> None:
        await asyncio.wrap_future(stage.submit(model, [next(texts)], part="prefill"))
        took.append(time.perf_counter() - due)

    async def run() -> int:
        await ask(time.perf_counter())
        took.clear()
        due = time.perf_counter()
        until, asked = due + seconds, []
        flooding = asyncio.ensure_future(flood(stage, until))
        while (due := due + arrivals.expovariate(rate)) < until:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            asked.append(asyncio.create_task(ask(due)))
        await asyncio.gather(*asked)
        return await flooding

    try:
        probes = uvloop.run(run())
    finally:
        stage.close()
    p50_s, p99_s = np.quantile(took, (0.5, 0.99))
    return Latencies(p50_s * 1e3, p99_s * 1e3, probes / seconds)


async def _no_flood(stage: EmbeddingStage, until: float) -> int:
    return 0


async def _flood(model: Embedder, texts: Iterator[str], stage: EmbeddingStage, until: float) -> int:
    """Keep probes outstanding in a stage."""
    probes = 0

    async def probe() -> None:
        nonlocal probes
        while time.perf_counter() < until:
            await asyncio.wrap_future(stage.submit(model, [next(texts)], part="decode"))
            probes += 1

    await asyncio.gather(*[probe() for _ in range(_OUTSTANDING)])
    return probes


@contextmanager
def _decode_worker(name: str, texts: Sequence[str]) -> Iterator[Flood]:
    """Start a process that embeds probes as a decode worker does; yield its flood."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, name, texts), daemon=True)
    process.start()
    theirs.close()

    async def flood(_: EmbeddingStage, until: float) -> int:
        ours.send(until)
        return int(await asyncio.to_thread(ours.recv))

    try:
        assert ours.poll(_WAIT_S), "the process that embeds probes did not load its embedder in time"
        ours.recv()
        yield flood
        ours.send(None)
        process.join(_WAIT_S)
    finally:
        process.kill()
        process.join(_WAIT_S)
        ours.close()


def _serve(pipe: Connection, name: str, texts: Sequence[str]) -> None:
    os.setsid()
    model, probes = load_embedder(name), itertools.cycle(texts)
    model.embed(texts[:1])
    pipe.send("ready")
    while (until := pipe.recv()) is not None:
        stage = EmbeddingStage()
        pipe.send(uvloop.run(_flood(model, probes, stage, until)))
        stage.close()
