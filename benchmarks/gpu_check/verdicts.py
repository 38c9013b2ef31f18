"""What was measured against what must be reached: pass, aim (more than must be), FAIL, or not measured."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Found = Mapping[str, Any]  # every section's data, by its name


class Bar(NamedTuple):
    """A figure, how it is taken from what was found, and the values that pass and that are aimed at."""

    what: str
    figure: Callable[[Found], float]
    least: bool  # whether more is better
    bar: float
    aim: float


def _ratio(figure: Callable[[Any], float]) -> Callable[[Found], float]:
    """Ours over cuVS's."""
    return lambda found: figure(found["cuvs"]["ours"]) / figure(found["cuvs"]["theirs"])


def _bandwidth(found: Found) -> float:
    """Bytes of rows a second of the kernel that compares them, of what a copy reads and writes."""
    kernels = found["kernels"]
    return float(kernels["distance_bytes_s"] / kernels["copy_bytes_s"])


BARS = (
    Bar("recall@10", lambda found: float(found["cuvs"]["ours"]["recall"]), True, 0.95, 0.95),
    Bar("full batch, queries/s against cuVS", _ratio(lambda one: float(one["per_s"])), True, 0.8, 1.2),
    Bar(
        "p99 at 60% of cuVS's batch rate, against its windows of 1 ms",
        _ratio(lambda one: float(one["stream"]["p99_s"])), False, 0.5, 0.15,
    ),
    Bar("one query alone, p50 against cuVS", _ratio(lambda one: float(one["alone_s"])), False, 1.0, 0.5),
    Bar("bytes of rows that were compared against a copy's, read and written", _bandwidth, True, 0.5, 0.7),
)  # fmt: skip


def verdicts(found: Found) -> list[tuple[str, str, str]]:
    """(what, figure beside bar and aim, verdict) for each bar."""
    return [_verdict(bar, found) for bar in BARS]


def _verdict(bar: Bar, found: Found) -> tuple[str, str, str]:
    wanted = f"{'≥' if bar.least else '≤'} {bar.bar:g}, aim {bar.aim:g}"
    try:
        figure = bar.figure(found)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a section that was skipped, failed or found nothing
        return bar.what, wanted, "not measured"
    reached = [figure >= value if bar.least else figure <= value for value in (bar.bar, bar.aim)]
    return bar.what, f"{figure:.3f} {wanted}", "aim" if reached[1] else "pass" if reached[0] else "FAIL"
