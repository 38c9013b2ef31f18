"""Goodput of nodes that have prefill and decode apart, never, or choose for each prompt, on the same two cores."""

import os

from benchmarks.serve.bench import Bench
from benchmarks.serve.report import Measure, Section
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, Kind, goodput

_LOADS = (0.55, 0.8, 0.95, 1.1, 1.25)


def run(bench: Bench) -> Section:
    """The same requests at the same times; limits from what a request takes alone where both are apart."""
    cores = sorted(os.sched_getaffinity(0))
    both = {"workers": 2, "slots": 16, "cores": [[cores[0]], [cores[-1]]]}
    section = Section("disaggregation", "")
    lines: dict[str, Curve] = {}
    with bench.stand("node", handover={"disaggregate": "always"}) as apart:
        kind = Kind(bench, apart)
        slo = {"ttft_s": kind.ttft_s, "tpot_s": kind.tpot_s}
        lines["one prefill, one decode, apart"] = kind.curve(apart, _LOADS)
    with bench.stand("node", slo=slo) as chooses:
        lines["one prefill, one decode, chooses"] = kind.curve(chooses, _LOADS)
    with bench.stand("node", slo=slo, decode=both) as chooses:
        lines["one prefill, two decode, chooses"] = kind.curve(chooses, _LOADS)
        prompts = {
            label: chooses.labelled("prefill", "trinity_prompts_total", label) for label in ("prefill", "decode")
        }
    with bench.stand("colocated") as colocated:
        lines["two that do both, colocated"] = kind.curve(colocated, _LOADS)
    section.text = (
        f"Limits: TTFT {kind.ttft_s * 1e3:.0f} ms, TPOT {kind.tpot_s * 1e3:.1f} ms. Goodput is the greatest load tried "
        f"at which {ATTAINMENT:.0%} of the sent requests meet both."
    )
    section.curves = {"requests/s, attainment": lines}
    section.measures = [Measure(f"{name}: goodput", goodput(points), "requests/s") for name, points in lines.items()]
    section.details = {"prompts of the third": prompts} | kind.told
    return section
