"""Effects of the reserve on a running node with an overloaded pool.

In addition to the node's requests, two clients flood the pool with the most expensive prefill and decode queries, so
only r determines which stage is served.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Outcome, open_loop
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.system import System
from ipc import STAGES, RingClient, SearchSpec, Stage
from runtime.node.config import PoolSection

_COSTLY: dict[str, Any] = {"top_m": 512, "search_width": 1}
_EVERY = 4  # tokens between probes
_RATE, _SECONDS = 2.0, 10.0  # of requests, for each reserve
_TIMEOUT_S = 10.0  # clients disconnect after it
_WINDOW = 192  # outstanding queries of each flood: about 20 ms of the pool's throughput


def run(bench: Bench) -> Section:
    """Compare the shipped reserve with a reserve of no slots and of all slots."""
    section = Section(
        "orders",
        "A pool overloaded by requests with retrieval and probes and by two floods of "
        f"{_WINDOW} queries each. r = 0 is “always decode”, r = 1 “always prefill”.",
    )
    shipped = PoolSection().reserve
    found: dict[float, dict[str, float]] = {}
    for reserve in (0.0, shipped, 1.0):
        fixed: dict[str, Any] = {"control": {"enabled": False}, "pool": _COSTLY | {"reserve": reserve}}
        with bench.system("node", **fixed) as system, flooded(system, bench.seed, _WINDOW):
            before = _stalls(system)
            timed = bench.load(_RATE, bench.seconds(_SECONDS), bench.seed, retrieval=_retrieval())
            outcomes = open_loop(system.url, timed, _TIMEOUT_S)
            stalled, rows = (after - then for after, then in zip(_stalls(system), before, strict=True))
            found[reserve] = _timings_of(outcomes) | {"decode stalled": stalled / max(rows, 1e-9)}
    for reserve, result in found.items():
        named = f"r = {reserve:g}" + (" (shipped)" if reserve == shipped else "")
        section.measures += [
            Measure(f"{named}: answered", result["answered"]),
            Measure(f"{named}: TTFT p50", result["ttft"] * 1e3, "ms"),
            Measure(f"{named}: TPOT p50", result["tpot"] * 1e3, "ms"),
            Measure(f"{named}: decode stalled", result["decode stalled"]),
        ]
    ours = found[shipped]
    section.measures += [
        Measure("always decode breaks TTFT: against shipped", found[0.0]["ttft"] / ours["ttft"], "×", "≥", 3),
        Measure("always prefill idles decode: TPOT, against shipped", found[1.0]["tpot"] / ours["tpot"], "×", "≥", 3),
        Measure("the same: share of time that decode's rows are stalled", found[1.0]["decode stalled"], "", "≥", 0.9),
    ]
    section.details["orders"] = {f"{reserve:g}": result for reserve, result in found.items()}
    return section


def _timings_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return medians over all requests sent; one without an answer counts with its client's timeout."""
    return {
        "answered": sum(outcome.completed for outcome in outcomes) / len(outcomes),
        "ttft": percentile([o.timings["ttft"] if o.completed else _TIMEOUT_S for o in outcomes], 50),
        "tpot": percentile([o.timings["tpot"] if o.completed else _so_far(o) for o in outcomes], 50),
    }


def _so_far(outcome: Outcome) -> float:
    """Return the time per token of an answer whose client disconnected."""
    return (outcome.ended_s - outcome.sent_s) / max(outcome.tokens, 1)


def _stalls(system: System) -> tuple[float, float]:
    names = ("trinity_decode_stall_seconds_total", "trinity_decode_row_seconds_total")
    stall, rows = (system.counter("decode", name) for name in names)
    return stall, rows


def _retrieval() -> dict[str, Any]:
    return {"collection": "docs", "k": 2, "every_tokens": _EVERY}


# ---- floods


@contextmanager
def flooded(system: System, seed: int, window: int) -> Iterator[None]:
    """Keep `window` queries of each stage in the pool."""
    ended = threading.Event()
    endpoint = system.plan.endpoint(system.plan.of_role("pool")[0].name)
    vectors = np.random.default_rng(seed).standard_normal((64, 256)).astype(np.float32)

    def flood(stage: Stage) -> None:
        spec = SearchSpec("docs", 2, stage, **_COSTLY)
        with RingClient(endpoint, f"flood-{stage}") as client:
            sent = answered = 0
            while not ended.is_set():
                while sent - answered < window:
                    client.submit(vectors[sent % len(vectors)], spec)
                    sent += 1
                client.wait(50.0)
                answered += len(client.poll())

    threads = [threading.Thread(target=flood, args=(stage,)) for stage in STAGES]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
