"""Plot of a run over time, if matplotlib is installed: control parameters, queues, and decode rows."""

from collections.abc import Sequence
from pathlib import Path

from runtime.simulator.result import Result


def draw(results: Sequence[Result], path: Path) -> bool:
    """Write a PNG with a column per result. Return False, and write nothing, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7 * len(results), 8))
    grid = figure.subplots(3, len(results), sharex="col", squeeze=False)
    for column, result in enumerate(results):
        at = [sample.at_s for sample in result.samples]
        knobs, queues, rows = (grid[line][column] for line in range(3))
        knobs.set_title(f"{result.policy}, {result.sent_per_s:.1f} requests/s: {result.attainment:.1%} met both SLOs")
        knobs.plot(at, [sample.reserve for sample in result.samples], label="reserve r", drawstyle="steps-post")
        knobs.set_ylim(0, 1)
        flush = knobs.twinx()
        flush.plot(at, [sample.flush_prefill_s * 1e3 for sample in result.samples], "C1--", label="τ_pre (ms)")
        flush.set_ylabel("τ_pre (ms)")
        knobs.set_ylabel("r")
        for name in ("pool_prefill", "pool_decode", "prefill", "offers"):
            queues.plot(at, [getattr(sample, name) for sample in result.samples], label=name.replace("_", ": "))
        queues.set_ylabel("waiting")
        queues.set_yscale("symlog")
        rows.plot(at, [sample.rows for sample in result.samples], label="rows")
        rows.plot(at, [sample.stalled for sample in result.samples], label="stalled for a probe")
        rows.set_ylabel("rows in decode")
        rows.set_xlabel("s")
        for axes in (knobs, queues, rows):
            axes.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    return True
