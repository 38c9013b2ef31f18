"""Targets of the check and their verdicts: pass, aim (better than required), FAIL, or not measured."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Results = Mapping[str, Any]  # data of every section by name


class Target(NamedTuple):
    """A target: a description, how to compute its figure from the results, the values required and aimed at."""

    what: str
    figure: Callable[[Results], float]
    least: bool  # whether larger is better
    required: float
    aim: float


def _best(figures: list[float], best: Callable[[list[float]], float]) -> float:
    """Return the best of the figures that are not NaN (no percentile without finished queries); NaN if all are."""
    return best([one for one in figures if not math.isnan(one)] or [math.nan])


def _ratio(figure: Callable[[Any], float], best: Callable[[list[float]], float]) -> Callable[[Results], float]:
    """Return the ratio of ours to cuVS's: the better of launches and, if measured, the resident kernel."""

    def ratio(found: Results) -> float:
        ours = [figure(found["cuvs"]["ours"])]
        if resident := (found.get("resident") or {}).get("resident"):
            ours.append(figure(resident))
        return _best(ours, best) / figure(found["cuvs"]["theirs"])

    return ratio


def _resident(figure: Callable[[Any], float]) -> Callable[[Results], float]:
    """Return the ratio of the resident kernel to launches of its stages."""

    def ratio(found: Results) -> float:
        forms = found["resident"]
        return figure(forms["resident"]) / figure(forms["staged"])

    return ratio


def _per_s(one: Any) -> float:
    return float(one["per_s"])


def _p99_s(one: Any) -> float:
    return float(one["stream"]["p99_s"])


def _alone_s(one: Any) -> float:
    return float(one["alone_s"])


def _flood(form: str) -> Callable[[Results], float]:
    """Return the ratio of prefill's p99 under a decode flood to its p99 alone."""

    def ratio(found: Results) -> float:
        one = found["flood"][form]
        return float(one["flood_p99_s"]) / float(one["alone_p99_s"])

    return ratio


def _bandwidth(found: Results) -> float:
    """Return the bandwidth of rows in the distance kernel, relative to a copy's reads and writes."""
    kernels = found["kernels"]
    return float(kernels["distance_bytes_s"] / kernels["copy_bytes_s"])


TARGETS = (
    Target("recall@10", lambda found: float(found["cuvs"]["ours"]["recall"]), True, 0.95, 0.95),
    Target("full batch, queries/s against cuVS", _ratio(_per_s, max), True, 0.8, 1.2),
    Target("p99 at 60% of cuVS's batch rate, against its windows of 1 ms", _ratio(_p99_s, min), False, 0.5, 0.15),
    Target("one query alone, p50 against cuVS", _ratio(_alone_s, min), False, 1.0, 0.5),
    Target("row bandwidth of the distance kernel against a copy's reads and writes", _bandwidth, True, 0.5, 0.7),
    Target("resident kernel, all at once against launches", _resident(_per_s), True, 0.9, 1.0),
    Target("resident kernel, p99 of arrivals against launches", _resident(_p99_s), False, 1.0, 0.5),
    Target("resident kernel, one query alone against launches", _resident(_alone_s), False, 1.0, 0.7),
    Target("prefill's p99 under decode's flood against alone, as planned", _flood("auto"), False, 1.3, 1.1),
    Target("prefill's p99 under decode's flood against alone, launches", _flood("launches"), False, 2.0, 1.1),
)  # fmt: skip


def verdicts(found: Results) -> list[tuple[str, str, str]]:
    """Return (description, figure with its limits, verdict) for each target."""
    return [_verdict(target, found) for target in TARGETS]


def _verdict(target: Target, found: Results) -> tuple[str, str, str]:
    limits = f"{'≥' if target.least else '≤'} {target.required:g}, aim {target.aim:g}"
    try:
        figure = target.figure(found)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # the section was skipped, failed or has no results
        return target.what, limits, "not measured"
    reached = [figure >= value if target.least else figure <= value for value in (target.required, target.aim)]
    return target.what, f"{figure:.3f} {limits}", "aim" if reached[1] else "pass" if reached[0] else "FAIL"
