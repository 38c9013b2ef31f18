"""Effects of the reserve and the control law on a running node with an overloaded pool.

In addition to the node's requests, two clients flood the pool with the most expensive prefill and decode queries, so
only r determines which stage is served.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, closed_loop, open_loop
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.system import System
from ipc import STAGES, RingClient, SearchSpec, Stage
from runtime.node.config import PoolSection

_COSTLY: dict[str, Any] = {"top_m": 512, "search_width": 1}
_EVERY = 4  # tokens between probes
_RATE, _SECONDS = 2.0, 10.0  # of requests, for each reserve
_TIMEOUT_S = 10.0  # clients disconnect after it
_WINDOW = 192  # outstanding queries of each flood: about 20 ms of the pool's throughput
_OUTSTANDING = 6  # requests, for the link utilization
_LINK_S, _LOOK_S = 24.0, 1.0
_LINK_PROMPT = 512
_LINK_SLOTS = 10  # so that r moves in steps


def orders(bench: Bench) -> Section:
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


# ---- the link


def link(bench: Bench) -> Section:
    """Run a control law whose only signal is u_kv."""
    section = Section(
        "link",
        "As above, with a link utilization below its target: the law starts at "
        f"r = 0.1 with {_LINK_SLOTS} slots, and only u_kv changes it.",
    )
    uses = {}
    for reserve in (0.1, 0.9):
        fixed: dict[str, Any] = {
            "control": {"enabled": False}, "pool": _COSTLY | {"reserve": reserve, "slots": _LINK_SLOTS}
        }  # fmt: skip
        uses[reserve] = fmean(use for _, use, _ in _watched(bench, bench.seconds(_LINK_S) / 3, fixed))
    target = (uses[0.1] + uses[0.9]) / 2
    tuned: dict[str, Any] = {
        # Waits above a tenth of their target show that prefill has work; with these targets neither waits nor stalls
        # change r.
        "control": {
            "enabled": True, "link_target": target, "prefill_wait_target_s": 1.0, "decode_stall_target": 1.0,
            "dwell_s": 0.5, "hysteresis": 0.1,
        },
        "pool": _COSTLY | {"reserve": 0.1, "slots": _LINK_SLOTS},
    }  # fmt: skip
    looks = _watched(bench, bench.seconds(_LINK_S), tuned)
    reached = next((at for at, use, _ in looks if use >= target), float("nan"))
    half = looks[len(looks) // 2 :]
    reserves = [reserve for _, _, reserve in looks]
    moves = [after - before for before, after in pairwise(reserves) if after != before]
    turns = sum(one * other < 0 for one, other in pairwise(moves))
    section.measures += [
        Measure("link in use at r = 0.1", uses[0.1] * 100, "%"),
        Measure("link in use at r = 0.9", uses[0.9] * 100, "%"),
        Measure("its target, between the two", target * 100, "%"),
        Measure("seconds until it is reached, from r = 0.1", reached, "s"),
        Measure("second half: link in use / target", fmean(use for _, use, _ in half) / target, "×", "≥", 0.8),
        Measure("second half: standard deviation of r", pstdev(reserve for _, _, reserve in half), "", "≤", 0.1),
        Measure("changes of direction of r", turns, "", "≤", 2),
        Measure("r at the end", reserves[-1]),
    ]
    section.curves["the link under the control law: s, share"] = {
        "link in use": [(at, use) for at, use, _ in looks],
        "its target": [(at, target) for at, _, _ in looks],
        "r / 10": [(at, reserve / 10) for at, _, reserve in looks],
    }
    return section


def _watched(bench: Bench, seconds: float, more: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Return samples (s, link utilization since the last sample, r), with `_OUTSTANDING` long prompts in flight."""
    random = np.random.default_rng(bench.seed)
    retrieval = {"collection": "docs", "k": 2}
    with bench.system("node", **more) as system, flooded(system, bench.seed, _WINDOW):
        ended = threading.Event()

        def bodies() -> Iterator[Body]:
            while not ended.is_set():
                yield bench.body(random, _LINK_PROMPT, 2, retrieval=retrieval)

        def send() -> None:
            for body in bodies():
                closed_loop(system.url, [body], 1)

        threads = [threading.Thread(target=send) for _ in range(_OUTSTANDING)]
        for thread in threads:
            thread.start()
        looks, begin, busy = [], time.monotonic(), _busy(system)
        last = begin
        while last - begin < seconds:
            ended.wait(_LOOK_S)
            now, used = time.monotonic(), _busy(system)
            looks.append((now - begin, (used - busy) / (now - last), system.reserve))
            last, busy = now, used
        ended.set()
        for thread in threads:
            thread.join()
    return looks


def _busy(system: System) -> float:
    return system.counter("decode", "trinity_kv_link_busy_seconds_total")


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
