"""Report of `benchmarks.policy`: tables and plots."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.report import plot, table
from benchmarks.policy.records import FIXED, OTHERS, SHIPPED, Report, Row

_HEAD = (
    *("trace", "fixed", "N", "load", "sent/s", "shipped", "paper", "FIFO", "static"),
    *("best fixed r", "/ best", "±", "/ best fixed r", "r"),
)


def markdown(report: Report) -> str:
    """Return the whole report."""
    machine = report.machine
    lines = [
        "# Policies, simulated",
        "",
        f"`python -m benchmarks.policy`: windows of {report.requests} requests of each trace that begin at requests "
        f"{', '.join(map(str, report.windows))}, as far as the trace is long enough; {report.took_s:.0f} s on "
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}. Simulated, not measured: "
        "service times of an H100 with an 8-billion-parameter Llama from data sheets "
        "(`runtime/simulator/times/service.py`).",
        "",
        *_policies(report),
    ]
    return "\n".join(lines)


def _policies(report: Report) -> Iterator[str]:
    yield "## Goodput (requests/s that met TTFT and TPOT, over sent requests)"
    yield ""
    yield (
        "3 prefill and 4 decode GPUs; a pool that is fully busy at 100% load: `fixed` is the part of an extend that "
        "does not depend on its slots, N the number of slots that the pool derives from it. SLOs: "
        + ", ".join(f"{name} TTFT {slo.ttft_s} s, TPOT {slo.tpot_s * 1e3:.0f} ms" for name, slo in report.slos.items())
        + ". `±` is the standard error over windows of the difference to the best of the others, as a ratio. "
        'Shipped is `policy = "trinity"` with the control law, which starts at r = 0.3; r: the range it used.'
    )
    yield ""
    yield from table(_HEAD, map(_cells, report.rows))
    yield ""
    yield _verdict(report.rows)


def _cells(row: Row) -> list[str]:
    ours, best_fixed = row.goodput[SHIPPED], row.goodput[row.best_fixed]
    return [
        row.trace,
        f"{row.fixed_s * 1e6:.0f} µs",
        _range(row.slots),
        f"{row.load:.0%}",
        f"{row.sent_per_s:.2f}",
        f"{ours:.2f}",
        *(f"{row.goodput[name]:.2f}" for name in OTHERS),
        f"{best_fixed:.2f} ({row.best_fixed[6:]})",
        _ratio(ours, row.best, 3),
        _ratio(row.error, row.best, 3),
        _ratio(ours, best_fixed),
        f"{row.reserve[0]:.2f}–{row.reserve[1]:.2f}",
    ]


def _verdict(rows: list[Row]) -> str:
    def named(row: Row) -> str:
        return f"{row.trace} {row.fixed_s * 1e6:.0f} µs {row.load:.0%}"

    behind = [row for row in rows if row.against_all < 0.98]
    missed = ", ".join(f"{named(row)}: {row.against_all:.3f} ± {row.error / row.best:.3f}" for row in behind)
    most = max(rows, key=lambda row: row.goodput[SHIPPED] / max(row.goodput[row.best_fixed], 1e-9))
    least = min(rows, key=lambda row: row.goodput[SHIPPED] / max(row.goodput[row.best_fixed], 1e-9))
    ends = " and ".join(
        f"{_ratio(row.goodput[SHIPPED], row.goodput[row.best_fixed])} ({named(row)})" for row in (least, most)
    )
    ahead = sum(row.against_all >= 1.05 for row in rows)
    return (
        f"In {len(rows) - len(behind)} of {len(rows)} rows the shipped policy's goodput is at least .98 of the best of "
        f"paper, FIFO, static and every fixed r, at least 1.05 in {ahead}{f'; less in {missed}' if missed else ''}. "
        f"Relative to the best fixed r it is between {ends}."
    )


def _range(values: list[int]) -> str:
    return "–".join(map(str, dict.fromkeys((min(values), max(values)))))


def _ratio(value: float, other: float, digits: int = 2) -> str:
    return f"{value / other:.{digits}f}" if other > 0 else "–"


def draw_goodput(report: Report, path: Path) -> None:
    """Plot the share of sent requests that met both SLOs by load, with a panel for each trace."""
    cases = list(dict.fromkeys((row.trace, row.fixed_s) for row in report.rows))
    columns = len({trace for trace, _ in cases})
    each = len(cases) // columns
    cases = [cases[column * each + row] for row in range(each) for column in range(columns)]  # a column per trace
    with plot(path, columns, each) as panels:
        _goodput_panels(report, cases, panels)


def _goodput_panels(report: Report, cases: list[tuple[str, float]], panels: list[Any]) -> None:
    for axes, (trace, fixed_s) in zip(panels, cases, strict=True):
        rows = [row for row in report.rows if (row.trace, row.fixed_s) == (trace, fixed_s)]
        loads = [row.load * 100 for row in rows]
        best = [max(row.attainment[name] for name in FIXED) for row in rows]
        axes.plot(loads, best, "0.6", lw=5, alpha=0.6, label="best fixed r")
        for name, style in zip(OTHERS, ("C1--", "C2--", "C3--"), strict=True):
            axes.plot(loads, [row.attainment[name] for row in rows], style, label=name)
        axes.plot(loads, [row.attainment[SHIPPED] for row in rows], "C0o-", ms=4, label="shipped")
        axes.set_title(f"{trace}, N = {rows[0].slots[0]}")
        axes.set_xlabel("load (% of the pool's capacity)")
        axes.set_ylim(0, 1.05)
    panels[0].set_ylabel("met TTFT and TPOT")
    panels[0].legend(fontsize=8)
