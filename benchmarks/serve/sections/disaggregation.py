"""Goodput of nodes that have prefill and decode apart, never, or choose for each prompt, on the same two cores.

All nodes are up at once, and each load is offered to one after the other, round by round, so that what the machine does
meanwhile meets all of them alike. Their processes go before whatever else runs, light ones first; how much of the cores
others used all the same is told.
"""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import fmean

from benchmarks.serve.bench import Bench
from benchmarks.serve.report import Measure, Section
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, Kind, goodput
from benchmarks.serve.stand import Stand

_LOADS = (0.25, 0.5, 0.75, 1.0)
_SECONDS = 6.0  # of load for each point, a round
_ROUNDS = 2
_DOCUMENTS = 0.1
_AMONG_DOCUMENTS = (0.3, 0.4, 0.5, 0.6)
_COLOCATED_LOADS = (0.08, 0.13, 0.18, 0.25)  # among documents: a step with a chunk of one is late for every row
_REQUESTS = 100  # of a point among documents, a round, which are few
_APART, _CHOOSES, _MORE, _COLOCATED = "1 + 1, always apart", "1 + 1, chooses", "1 + 2, chooses", "2 colocated"


def chats(bench: Bench) -> Section:
    """Short chats."""
    return _compared(bench, "disaggregation", 0.0, 1.0, dict.fromkeys((_APART, _CHOOSES, _MORE, _COLOCATED), _LOADS))


def documents(bench: Bench) -> Section:
    """Chats with a tenth of long documents among them."""
    loads = {_APART: _AMONG_DOCUMENTS, _CHOOSES: _AMONG_DOCUMENTS, _COLOCATED: _COLOCATED_LOADS}
    return _compared(bench, "documents", _DOCUMENTS, 2.0, loads)


Loads = Mapping[str, tuple[float, ...]]  # by system, of what one that is always apart can answer


def _compared(bench: Bench, name: str, share: float, bar: float, loads: Loads) -> Section:
    """The same requests at the same times, at equal loads; limits from what a request takes alone where both are
    apart."""
    cores = sorted(os.sched_getaffinity(0))
    both = {"workers": 2, "slots": 16, "cores": [[cores[0]], [cores[-1]]]}
    with ExitStack() as up:
        apart = up.enter_context(bench.stand("node", models_last=True, handover={"disaggregate": "always"}))
        kind = Kind(bench, apart, documents=share)
        slo = {"ttft_s": kind.ttft_s, "tpot_s": kind.tpot_s}
        stands = {_APART: apart, _CHOOSES: up.enter_context(bench.stand("node", models_last=True, slo=slo))}
        if _MORE in loads:
            stands[_MORE] = up.enter_context(bench.stand("node", models_last=True, slo=slo, decode=both))
        stands[_COLOCATED] = up.enter_context(bench.stand("colocated", models_last=True))
        lines, others = _played(bench, kind, stands, loads, bench.count(_REQUESTS) if share else 0)
        chosen = {
            system: {by: stand.labelled("prefill", "trinity_prompts_total", by) for by in ("prefill", "decode")}
            for system, stand in stands.items()
        }
    told = f", of a document {kind.document_ttft_s * 1e3:.0f} ms" if share else ""
    section = Section(
        name,
        f"Prefill + decode workers. Limits: TTFT {kind.ttft_s * 1e3:.0f} ms{told}, TPOT {kind.tpot_s * 1e3:.1f} ms; "
        f"{share:.0%} of the requests are documents of {bench.long_prompt_tokens} tokens. Goodput is the load at which "
        f"{ATTAINMENT:.0%} of the sent requests meet both, between the loads tried by a straight line. "
        f"Others used {fmean(others):.2f} cores in the mean, {max(others):.2f} at most.",
    )
    section.curves = {f"{name}: requests/s, attainment": lines}
    found = {system: goodput(points) for system, points in lines.items()}
    section.measures = [Measure(f"{system}: goodput", rate, "requests/s") for system, rate in found.items()]
    theirs = found.pop(_COLOCATED)
    ratio = max(found.values()) / theirs if theirs else float("inf")
    section.measures.append(Measure("the best of them / colocated", ratio, "×", "≥", bar))
    section.details = {"prompts computed by": chosen, "cores that others used": others} | kind.told
    return section


def _played(
    bench: Bench, kind: Kind, stands: dict[str, Stand], loads: Loads, requests: int
) -> tuple[dict[str, Curve], list[float]]:
    """Each stand's curve, means over the rounds, of so many requests a point and round at least; and how many cores
    others used in each play."""
    capacity = kind.told["capacity_per_s"]
    met: dict[tuple[str, float], list[float]] = {}
    others: list[float] = []
    for round_number in range(_ROUNDS):
        for place in range(len(loads[_APART])):
            for system, stand in stands.items():
                rate = loads[system][place] * capacity
                used_s, begin = stand.used_s()[2], time.monotonic()
                seconds = max(bench.seconds(_SECONDS), requests / rate)
                share = kind.attained(stand, rate, seconds, bench.seed + 100 + round_number)
                met.setdefault((system, rate), []).append(share)
                others.append((stand.used_s()[2] - used_s) / (time.monotonic() - begin))
    lines = {
        system: [(load * capacity, fmean(met[system, load * capacity])) for load in loads[system]] for system in stands
    }
    return lines, others
