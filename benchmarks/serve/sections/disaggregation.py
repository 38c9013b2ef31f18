"""Goodput of disaggregated, colocated and conditionally disaggregating nodes on the same two cores.

All nodes run at the same time, and each load is offered to them alternately, round by round, so that disturbances
affect all alike. Their processes have priority over others, light ones first; the cores used by others are reported.
"""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import fmean

from benchmarks.serve.bench import Bench
from benchmarks.serve.report import Measure, Section
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, RequestProfile, goodput
from benchmarks.serve.system import System

_LOADS = (0.25, 0.5, 0.75, 1.0)
_SECONDS = 6.0  # of load for each point and round
_ROUNDS = 2
_DOCUMENTS = 0.1
_AMONG_DOCUMENTS = (0.3, 0.4, 0.5, 0.6)
_COLOCATED_LOADS = (0.08, 0.13, 0.18, 0.25)  # with documents: a step with a document's chunk is late for every row
_REQUESTS = 100  # minimum for each point and round with documents, which are few
_APART, _CHOOSES, _MORE, _COLOCATED = "1 + 1, always apart", "1 + 1, chooses", "1 + 2, chooses", "2 colocated"


def chats(bench: Bench) -> Section:
    """Short chats."""
    return _compare(bench, "disaggregation", 0.0, 1.0, dict.fromkeys((_APART, _CHOOSES, _MORE, _COLOCATED), _LOADS))


def documents(bench: Bench) -> Section:
    """Chats, a tenth of them with long documents."""
    loads = {_APART: _AMONG_DOCUMENTS, _CHOOSES: _AMONG_DOCUMENTS, _COLOCATED: _COLOCATED_LOADS}
    return _compare(bench, "documents", _DOCUMENTS, 2.0, loads)


Loads = Mapping[str, tuple[float, ...]]  # by label, of what one that is always apart can answer


def _compare(bench: Bench, name: str, share: float, bar: float, loads: Loads) -> Section:
    """Send the same requests at the same times; limits are multiples of unloaded times of the disaggregated node."""
    cores = sorted(os.sched_getaffinity(0))
    both = {"workers": 2, "slots": 16, "cores": [[cores[0]], [cores[-1]]]}
    with ExitStack() as up:
        apart = up.enter_context(bench.system("node", models_last=True, handover={"disaggregate": "always"}))
        profile = RequestProfile(bench, apart, documents=share)
        slo = {"ttft_s": profile.ttft_s, "tpot_s": profile.tpot_s}
        systems = {_APART: apart, _CHOOSES: up.enter_context(bench.system("node", models_last=True, slo=slo))}
        if _MORE in loads:
            systems[_MORE] = up.enter_context(bench.system("node", models_last=True, slo=slo, decode=both))
        systems[_COLOCATED] = up.enter_context(bench.system("colocated", models_last=True))
        lines, others = _measure(bench, profile, systems, loads, bench.count(_REQUESTS) if share else 0)
        chosen = {
            label: {by: system.labelled("prefill", "trinity_prompts_total", by) for by in ("prefill", "decode")}
            for label, system in systems.items()
        }
    document_limit = f", of a document {profile.document_ttft_s * 1e3:.0f} ms" if share else ""
    section = Section(
        name,
        f"Prefill + decode workers. Limits: TTFT {profile.ttft_s * 1e3:.0f} ms{document_limit}, TPOT "
        f"{profile.tpot_s * 1e3:.1f} ms; {share:.0%} of the requests are documents of {bench.long_prompt_tokens} "
        f"tokens. Goodput is the load at which {ATTAINMENT:.0%} of the sent requests meet both, interpolated linearly "
        f"between the measured loads. Others used {fmean(others):.2f} cores on average, at most {max(others):.2f}.",
    )
    section.curves = {f"{name}: requests/s, attainment": lines}
    found = {label: goodput(points) for label, points in lines.items()}
    section.measures = [Measure(f"{label}: goodput", rate, "requests/s") for label, rate in found.items()]
    theirs = found.pop(_COLOCATED)
    ratio = max(found.values()) / theirs if theirs else float("inf")
    section.measures.append(Measure("the best of them / colocated", ratio, "×", "≥", bar))
    section.details = {"prompts computed by": chosen, "cores that others used": others} | profile.details
    return section


def _measure(
    bench: Bench, profile: RequestProfile, systems: dict[str, System], loads: Loads, requests: int
) -> tuple[dict[str, Curve], list[float]]:
    """Return each system's curve (means over the rounds, at least `requests` per point and round), and the cores used
    by others in each measurement."""
    capacity = profile.details["capacity_per_s"]
    met: dict[tuple[str, float], list[float]] = {}
    others: list[float] = []
    for round_number in range(_ROUNDS):
        for place in range(len(loads[_APART])):
            for label, system in systems.items():
                rate = loads[label][place] * capacity
                used_s, begin = system.used_s()[2], time.monotonic()
                seconds = max(bench.seconds(_SECONDS), requests / rate)
                share = profile.attained(system, rate, seconds, bench.seed + 100 + round_number)
                met.setdefault((label, rate), []).append(share)
                others.append((system.used_s()[2] - used_s) / (time.monotonic() - begin))
    lines = {
        label: [(load * capacity, fmean(met[label, load * capacity])) for load in loads[label]] for label in systems
    }
    return lines, others
