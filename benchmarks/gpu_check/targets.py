"""What was measured against what must be reached: pass, aim (more than must be), FAIL, or not measured."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Results = Mapping[str, Any]  # every section's data, by its name


class Target(NamedTuple):
    """A figure, how it is taken from what was found, and the values that pass and that are aimed at."""

    what: str
    figure: Callable[[Results], float]
    least: bool  # whether more is better
    bar: float
    aim: float


def _best(figures: list[float], best: Callable[[list[float]], float]) -> float:
    """The best of those that are known: who answered nobody in time has no percentile. NaN where none is."""
    return best([one for one in figures if not math.isnan(one)] or [math.nan])


def _ratio(figure: Callable[[Any], float], best: Callable[[list[float]], float]) -> Callable[[Results], float]:
    """Ours over cuVS's: the better of launches and, where they were measured, of blocks that stay."""

    def ratio(found: Results) -> float:
        ours = [figure(found["cuvs"]["ours"])]
        if resident := (found.get("resident") or {}).get("resident"):
            ours.append(figure(resident))
        return _best(ours, best) / figure(found["cuvs"]["theirs"])

    return ratio


def _resident(figure: Callable[[Any], float], best: Callable[[list[float]], float]) -> Callable[[Results], float]:
    """Blocks that stay over the better of the other forms."""

    def ratio(found: Results) -> float:
        forms = found["resident"]
        return figure(forms["resident"]) / _best([figure(forms["staged"]), figure(forms["fused"])], best)

    return ratio


def _per_s(one: Any) -> float:
    return float(one["per_s"])


def _p99_s(one: Any) -> float:
    return float(one["stream"]["p99_s"])


def _alone_s(one: Any) -> float:
    return float(one["alone_s"])


def _flood(form: str) -> Callable[[Results], float]:
    """Prefill's p99 while decode floods the pool, over the one without."""

    def ratio(found: Results) -> float:
        one = found["flood"][form]
        return float(one["flood_p99_s"]) / float(one["alone_p99_s"])

    return ratio


def _bandwidth(found: Results) -> float:
    """Bytes of rows a second of the kernel that compares them, of what a copy reads and writes."""
    kernels = found["kernels"]
    return float(kernels["distance_bytes_s"] / kernels["copy_bytes_s"])


TARGETS = (
    Target("recall@10", lambda found: float(found["cuvs"]["ours"]["recall"]), True, 0.95, 0.95),
    Target("full batch, queries/s against cuVS", _ratio(_per_s, max), True, 0.8, 1.2),
    Target("p99 at 60% of cuVS's batch rate, against its windows of 1 ms", _ratio(_p99_s, min), False, 0.5, 0.15),
    Target("one query alone, p50 against cuVS", _ratio(_alone_s, min), False, 1.0, 0.5),
    Target("bytes of rows that were compared against a copy's, read and written", _bandwidth, True, 0.5, 0.7),
    Target("blocks that stay, all at once against staged and fused", _resident(_per_s, max), True, 0.9, 1.0),
    Target("blocks that stay, p99 of arrivals against staged and fused", _resident(_p99_s, min), False, 1.0, 0.5),
    Target("blocks that stay, one query alone against staged and fused", _resident(_alone_s, min), False, 1.0, 0.7),
    Target("prefill's p99 under decode's flood against alone, as planned", _flood("auto"), False, 1.3, 1.1),
    Target("prefill's p99 under decode's flood against alone, launches", _flood("launches"), False, 1.3, 1.1),
)  # fmt: skip


def verdicts(found: Results) -> list[tuple[str, str, str]]:
    """(what, figure beside bar and aim, verdict) for each bar."""
    return [_verdict(bar, found) for bar in TARGETS]


def _verdict(bar: Target, found: Results) -> tuple[str, str, str]:
    wanted = f"{'≥' if bar.least else '≤'} {bar.bar:g}, aim {bar.aim:g}"
    try:
        figure = bar.figure(found)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a section that was skipped, failed or found nothing
        return bar.what, wanted, "not measured"
    reached = [figure >= value if bar.least else figure <= value for value in (bar.bar, bar.aim)]
    return bar.what, f"{figure:.3f} {wanted}", "aim" if reached[1] else "pass" if reached[0] else "FAIL"
