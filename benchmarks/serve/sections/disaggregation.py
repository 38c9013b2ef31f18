"""Goodput of nodes that have prefill and decode apart, never, or choose for each prompt, on the same two cores."""

import os

from benchmarks.serve.bench import Bench
from benchmarks.serve.report import Measure, Section
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, Kind, goodput

_LOADS = (0.4, 0.6, 0.8, 1.0, 1.2)
_DOCUMENTS = 0.1


def chats(bench: Bench) -> Section:
    """Short chats."""
    return _compared(bench, "disaggregation", 0.0, 1.0)


def documents(bench: Bench) -> Section:
    """Chats with a tenth of long documents among them."""
    return _compared(bench, "documents", _DOCUMENTS, 2.0)


def _compared(bench: Bench, name: str, share: float, bar: float) -> Section:
    """The same requests at the same times; limits from what a request takes alone where both are apart."""
    cores = sorted(os.sched_getaffinity(0))
    both = {"workers": 2, "slots": 16, "cores": [[cores[0]], [cores[-1]]]}
    lines: dict[str, Curve] = {}
    with bench.stand("node", handover={"disaggregate": "always"}) as apart:
        kind = Kind(bench, apart, documents=share)
        slo = {"ttft_s": kind.ttft_s, "tpot_s": kind.tpot_s}
        lines["1 + 1, always apart"] = kind.curve(apart, _LOADS)
    with bench.stand("node", slo=slo) as chooses:
        lines["1 + 1, chooses"] = kind.curve(chooses, _LOADS)
    with bench.stand("node", slo=slo, decode=both) as chooses:
        lines["1 + 2, chooses"] = kind.curve(chooses, _LOADS)
        prompts = {
            label: chooses.labelled("prefill", "trinity_prompts_total", label) for label in ("prefill", "decode")
        }
    with bench.stand("colocated") as colocated:
        lines["2 colocated"] = kind.curve(colocated, _LOADS)
    told = f", of a document {kind.document_ttft_s * 1e3:.0f} ms" if share else ""
    section = Section(
        name,
        f"Prefill + decode workers. Limits: TTFT {kind.ttft_s * 1e3:.0f} ms{told}, TPOT {kind.tpot_s * 1e3:.1f} ms; "
        f"{share:.0%} of the requests are documents of {bench.long_prompt_tokens} tokens. Goodput is the load at which "
        f"{ATTAINMENT:.0%} of the sent requests meet both, between the loads tried by a straight line.",
    )
    section.curves = {f"{name}: requests/s, attainment": lines}
    found = {system: goodput(points) for system, points in lines.items()}
    section.measures = [Measure(f"{system}: goodput", rate, "requests/s") for system, rate in found.items()]
    theirs = found.pop("2 colocated")
    ratio = max(found.values()) / theirs if theirs else float("inf")
    section.measures.append(Measure("the best of them / colocated", ratio, "×", "≥", bar))
    section.details = {"prompts of 1 + 2": prompts} | kind.told
    return section
