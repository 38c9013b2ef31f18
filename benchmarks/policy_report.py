"""Tables and plots of what `benchmarks.policy` found."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.policy_rows import FIXED, OTHERS, Report, Row


def markdown(report: Report) -> str:
    """The whole report."""
    machine = report.machine
    lines = [
        "# Policies and placements, simulated",
        "",
        f"`python -m benchmarks.policy`: windows of {report.requests} requests of each trace that begin at requests "
        f"{', '.join(map(str, report.windows))}; seed {report.seed}; {report.took_s:.0f} s on {machine['processor']}, "
        f"{machine['cores']} cores, Python {machine['python']}. Simulated, not measured: service times of an H100 with "
        "an 8-billion-parameter Llama from data sheets (`runtime/simulator/times/service.py`).",
        "",
        *_policies(report),
    ]
    if report.placements:
        lines += ["", *_placements(report)]
    if report.day is not None:
        day = report.day
        lines += [
            "",
            "## A day",
            "",
            f"Azure's hour 24 times over, {day.requests:,} requests, took {day.took_s / 60:.1f} minutes in one "
            f"process; {day.attainment:.1%} of the requests met both SLOs.",
        ]
    return "\n".join(lines) + "\n"


def _policies(report: Report) -> Iterator[str]:
    yield "## Goodput (requests/s that met TTFT and TPOT, over sent requests)"
    yield ""
    yield (
        "3 prefill and 4 decode GPUs; a pool that is busy all the time at 100% load: an extend costs "
        f"{report.fixed_s * 1e6:.0f} µs and about "
        + ", ".join(f"{slot * 1e6:.0f} µs a slot ({name})" for name, slot in report.slot_s.items())
        + ". SLOs: "
        + ", ".join(f"{name} TTFT {slo.ttft_s} s, TPOT {slo.tpot_s * 1e3:.0f} ms" for name, slo in report.slos.items())
        + ". `±` is a standard error of the difference to the best other policy, in the ratio's unit."
    )
    yield ""
    yield (
        "| trace | load | sent/s | adaptive | paper | FIFO | static | best fixed r "
        "| / best other | ± | / best fixed | r |"
    )
    yield "|---|" + "---:|" * 11
    for row in report.rows:
        ours = row.goodput["adaptive"]
        yield (
            f"| {row.trace} | {row.load:.0%} | {row.sent_per_s:.2f} | {ours:.2f} | "
            + " | ".join(f"{row.goodput[name]:.2f}" for name in OTHERS)
            + f" | {row.goodput[row.best_fixed]:.2f} ({row.best_fixed[6:]}) | {_ratio(ours, row.best_other)} "
            f"| {_ratio(row.error, row.best_other)} | {_ratio(ours, row.goodput[row.best_fixed])} "
            f"| {row.reserve[0]:.2f}–{row.reserve[1]:.2f} |"
        )
    yield ""
    yield _verdict(report.rows)


def _verdict(rows: list[Row]) -> str:
    def named(standing: str) -> str:
        found = [row for row in rows if row.standing == standing]
        shown = (f"{row.trace} {row.load:.0%} {_ratio(row.goodput['adaptive'], row.best_other, 3)}" for row in found)
        return f"{len(found)}" + (f" ({', '.join(shown)})" if found else "")

    least = min(rows, key=lambda row: row.goodput["adaptive"] / max(row.goodput[row.best_fixed], 1e-9))
    ahead = sum(row.standing == "ahead" for row in rows)
    return (
        f"Of {len(rows)} rows adaptive is at least as good as paper, FIFO and static in {ahead}; it is behind the best "
        f"of them by less than two standard errors in {named('even')}, and by more in {named('behind')}. Of the best "
        f"fixed r it has {_ratio(least.goodput['adaptive'], least.goodput[least.best_fixed])} at least."
    )


def _placements(report: Report) -> Iterator[str]:
    yield "## Placements of the index on 8 GPUs"
    yield ""
    yield (
        "The greatest rate at which 90% of the sent requests met both SLOs, for the best split of each placement "
        "(prefill + decode + pool GPUs, and the resource that by the roofline ends first). `search` is the cost of an "
        "extend over an H100's for 10 million vectors of 768 float16. With an H100's searches a pool of its own idles "
        "nearly all the time, and a GPU that could run the model is gone. The dearer a search, the more it slows down "
        "the model that it shares a GPU with, and the sooner a pool of its own pays."
    )
    yield ""
    yield "| trace | search | pool of its own | with prefill | coupled | own / best other |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in report.placements:
        cells = [
            f"{plan.rate:.1f} ({plan.prefill}+{plan.decode}"
            + (f"+{plan.pool}" if plan.pool else "")
            + f", {plan.busiest})"
            for plan in row.best
        ]
        others = max(plan.rate for plan in row.best[1:])
        yield f"| {row.trace} | ×{row.cost} | " + " | ".join(cells) + f" | {_ratio(row.best[0].rate, others)} |"


def _ratio(value: float, other: float, digits: int = 2) -> str:
    return f"{value / other:.{digits}f}" if other > 0 else "–"


def draw_goodput(report: Report, path: Path) -> None:
    """Share of the sent requests that met both SLOs, by load, a panel for each trace."""
    from matplotlib.figure import Figure

    traces = list(report.slot_s)
    figure = Figure(figsize=(4.2 * len(traces), 3.4))
    panels = figure.subplots(1, len(traces), squeeze=False)
    for axes, trace in zip(panels[0], traces, strict=True):
        rows = [row for row in report.rows if row.trace == trace]
        loads = [row.load * 100 for row in rows]
        best = [max(row.attainment[name] for name in FIXED) for row in rows]
        axes.plot(loads, best, "0.6", lw=5, alpha=0.6, label="best fixed r")
        for name, style in zip(OTHERS, ("C1--", "C2--", "C3--"), strict=True):
            axes.plot(loads, [row.attainment[name] for row in rows], style, label=name)
        axes.plot(loads, [row.attainment["adaptive"] for row in rows], "C0o-", ms=4, label="adaptive")
        axes.set_title(trace)
        axes.set_xlabel("load (% of the pool's capacity)")
        axes.set_ylim(0, 1.05)
    panels[0][0].set_ylabel("met TTFT and TPOT")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def draw_plans(report: Report, path: Path) -> None:
    """The greatest rate of each placement over that of a pool of its own, by what a search costs."""
    from matplotlib.figure import Figure

    traces = list(report.slot_s)
    figure = Figure(figsize=(4.2 * len(traces), 3.2))
    panels = figure.subplots(1, len(traces), squeeze=False)
    for axes, trace in zip(panels[0], traces, strict=True):
        rows = [row for row in report.placements if row.trace == trace]
        for i, name in enumerate(("pool of its own", "with prefill", "coupled")):
            at = [number + (i - 1) * 0.27 for number in range(len(rows))]
            axes.bar(at, [row.best[i].rate for row in rows], 0.25, label=name)
        axes.set_xticks(range(len(rows)), [f"×{row.cost}" for row in rows])
        axes.set_title(trace)
        axes.set_xlabel("cost of a search")
    panels[0][0].set_ylabel("requests/s at 90% attainment")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
