"""Tables and a plot of the results of `benchmarks.engine`."""

import math
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.report import plot, table

TARGETS = {"fashion": (0.95, 0.99, 0.999), "glove": (0.90, 0.95)}
OTHERS = (0.95, 0.99)
_PAIRS = (
    ("float32 with codes", "float32"),
    ("float32 with codes stepwise", "float32 with codes"),
    ("float32 stepwise", "float32"),
)

Record = dict[str, Any]


def speed_at(record: Record, recall: float) -> float | None:
    """Return the queries per second at a recall, interpolated between settings; None if no setting reaches it."""
    front: list[tuple[float, float]] = []
    for point in sorted(record["points"], key=lambda point: -point["qps"]):  # fastest first: recall must rise
        if not front or point["recall"] > front[-1][0]:
            front.append((point["recall"], point["qps"]))
    for (low, fast), (high, slow) in pairwise(front):
        if low <= recall <= high:
            part = (recall - low) / (high - low)
            return math.exp(math.log(fast) * (1 - part) + math.log(slow) * part)
    return front[0][1] if front and recall <= front[0][0] else None


def targets(name: str) -> tuple[float, ...]:
    return next((values for part, values in TARGETS.items() if part in name), OTHERS)


def report(result: Record) -> str:
    """Format the tables as Markdown."""
    machine, versions = result["machine"], result["versions"]
    clock = "processor time" if result["clock"] == "cpu" else "wall clock"
    lines = [
        f"{machine['processor']}, {machine['cores']} cores; Python {machine['python']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; {result['threads']} thread(s), {clock}, median of {result['rounds']} rounds"
        + ("; first 10,000 rows only" if result["quick"] else "")
        + ".",
    ]
    for name, part in result["sets"].items():
        recalls = targets(name)
        engines = part["engines"]
        hnswlib = next((record for record in engines if record["label"] == "hnswlib"), None)
        lines += ["", f"**{name}** ({part['size']:,} x {part['dim']}), recall@10 and queries/s", ""]
        head = ["engine", *(f"queries/s at {recall:g}" for recall in recalls), "recall at 64", "build s", "MiB"]
        rows = []
        for record in engines:
            cells = [_cell(record, hnswlib, recall) for recall in recalls]
            build = "-" if "stepwise" in record["label"] else f"{record['built']['seconds']:.1f}"
            rows.append(
                [record["label"], *cells, f"{record['recall_64']:.4f}", build, f"{record['bytes'] / 2**20:.0f}"]
            )
        lines += [*table(head, rows), "", *_ratios(engines, recalls), _builds(engines)]
    return "\n".join(lines)


def _cell(record: Record, hnswlib: Record | None, recall: float) -> str:
    speed = speed_at(record, recall)
    if speed is None:
        return "-"
    base = speed_at(hnswlib, recall) if hnswlib is not None else None
    return f"{speed:,.0f}" + (f" ({speed / base:.2f}x)" if base else "")


def _builds(engines: list[Record]) -> str:
    """Describe how the indexes were built; kept indexes may have other threads or another clock."""
    ways = {(record["built"]["threads"], record["built"]["clock"]) for record in engines}
    words = {"cpu": "processor time", "wall": "wall clock"}
    return "- built with " + "; ".join(f"{threads} thread(s), {words[clock]}" for threads, clock in sorted(ways))


def _ratios(engines: list[Record], recalls: tuple[float, ...]) -> list[str]:
    """Return ratios: ours to the best peer, codes to none, stepwise to batch."""
    ours = {record["label"].removeprefix("trinity "): record for record in engines if "trinity" in record["label"]}
    peers = [record for record in engines if "trinity" not in record["label"]]
    lines = []
    for recall in recalls:
        parts = []
        best = _best([record for record in peers if not record["compressed"]], recall)
        best_any = _best(peers, recall)
        any_own = _best([record for label, record in ours.items() if "stepwise" not in label], recall)
        exact = speed_at(ours["float32"], recall) if "float32" in ours else None
        if exact and best:
            parts.append(f"float32 / {best[1]} {exact / best[0]:.2f}x")
        if any_own and best_any:
            parts.append(f"{any_own[1]} / {best_any[1]} {any_own[0] / best_any[0]:.2f}x")
        for label, beside in _PAIRS:
            one, other = (speed_at(record, recall) if record else None for record in map(ours.get, (label, beside)))
            if one and other:
                parts.append(f"{label} / {beside} {one / other:.2f}x")
        lines.append(f"- at {recall:g}: " + "; ".join(parts))
    return lines


def _best(records: list[Record], recall: float) -> tuple[float, str] | None:
    speeds = [(speed, record["label"]) for record in records if (speed := speed_at(record, recall)) is not None]
    return max(speeds, default=None)


def draw(result: Record, path: Path) -> None:
    """Plot recall against queries per second, one panel per data set. Does nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    sets = result["sets"]
    with plot(path, len(sets), width=6, height=5) as axes:
        _panels(sets, axes)


def _panels(sets: Record, axes: list[Any]) -> None:
    for axis, (name, part) in zip(axes, sets.items(), strict=True):
        for record in part["engines"]:
            is_ours = "trinity" in record["label"]
            axis.plot(
                [1 - point["recall"] for point in record["points"]],
                [point["qps"] for point in record["points"]],
                marker="o" if is_ours else "x",
                markersize=3,
                linewidth=2 if is_ours else 1,
                linestyle=":" if "stepwise" in record["label"] else "-",
                label=record["label"],
            )
        axis.set(xscale="log", yscale="log", title=name, xlabel="1 - recall@10", ylabel="queries/s")
        axis.invert_xaxis()
        axis.grid(visible=True, which="both", alpha=0.2)
        axis.legend(fontsize=7)
