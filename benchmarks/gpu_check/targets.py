"""Targets of the check and their verdicts: pass, aim (better than required), FAIL, not measured, or no bar."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

Results = Mapping[str, Any]  # data of every section by name
WIDE = 768  # dimensions from which on a target's second bar holds
_HOST_US = 0.35


class Bar(NamedTuple):
    """The value required, and the one aimed at, if there is one."""

    required: float
    aim: float | None = None


class Target(NamedTuple):
    """A target: a description, how to compute its figure from the results, and its bars below `WIDE` dimensions and
    from there on (None: the figure is only reported)."""

    what: str
    figure: Callable[[Results], float]
    least: bool  # whether larger is better
    narrow: Bar | None
    wide: Bar | None


def _against_cuvs(figure: Callable[[Any], float]) -> Callable[[Results], float]:
    """Return the ratio of the resident kernel, the form that a pool alone on its GPU has, to cuVS."""

    def ratio(results: Results) -> float:
        return figure(results["resident"]["resident"]) / figure(results["cuvs"]["theirs"])

    return ratio


def _resident(figure: Callable[[Any], float]) -> Callable[[Results], float]:
    """Return the ratio of the resident kernel to launches of its stages."""

    def ratio(results: Results) -> float:
        forms = results["resident"]
        return figure(forms["resident"]) / figure(forms["staged"])

    return ratio


def _host_us(results: Results) -> float:
    """Return µs of a query in the resident form's loop, all queries at once: the host's time, and the device's where
    it is the limit. Raises ValueError if only without waits, in which records are collected, it is within the bar."""
    one = results["resident"]["resident"]
    whole, without_waits = 1e6 / one["per_s"], 1e6 * one["host_s"]
    if without_waits <= _HOST_US < whole:
        raise ValueError("the device is the limit")
    return float(whole)


def _per_s(one: Any) -> float:
    return float(one["per_s"])


def _p99_s(one: Any) -> float:
    return float(one["stream"]["p99_s"])


def _alone_s(one: Any) -> float:
    return float(one["alone_s"])


def _flood(form: str) -> Callable[[Results], float]:
    """Return the ratio of prefill's p99 under a decode flood to its p99 alone."""

    def ratio(results: Results) -> float:
        one = results["flood"][form]
        return float(one["flood_p99_s"]) / float(one["alone_p99_s"])

    return ratio


def _bandwidth(results: Results) -> float:
    """Return the bandwidth of rows in the distance kernel, relative to a copy's reads and writes."""
    kernels = results["kernels"]
    return float(kernels["distance_bytes_s"] / kernels["copy_bytes_s"])


def _p50_us(times: str) -> Callable[[Results], float]:
    """Return the median of times of the section "exchange", in µs."""
    return lambda results: 1e6 * median(results["exchange"][times])


def _handover(order: str) -> Callable[[Results], float]:
    """Return the ratio of a hand-over's time to a plain copy's."""

    def ratio(results: Results) -> float:
        one = results["handover"][order]
        return float(one["pull_s"] / one["copy_s"])

    return ratio


def _handover_host_us(results: Results) -> float:
    return 1e6 * max(float(results["handover"][order]["host_s"]) for order in ("in order", "scattered"))


def _both(required: float, aim: float | None = None) -> tuple[Bar, Bar]:
    """Return one bar for all dimensions."""
    return Bar(required, aim), Bar(required, aim)


SET_TARGETS = (
    Target("recall@10", lambda found: float(found["cuvs"]["ours"]["recall"]), True, *_both(0.95)),
    Target("one query alone, p50 against the better of cuVS's call and persistent kernel",
           _against_cuvs(_alone_s), False, *_both(0.35, 0.2)),
    Target("p99 at 60% of cuVS's batch rate, against its windows of 1 ms",
           _against_cuvs(_p99_s), False, None, Bar(0.1, 0.03)),
    Target("all at once, queries/s against cuVS's batches", _against_cuvs(_per_s), True, Bar(0.35, 0.7), Bar(0.9, 1.2)),
    Target("host time of a query, µs", _host_us, False, *_both(_HOST_US, 0.2)),
    Target("prefill's p99 under decode's flood against alone, as planned", _flood("auto"), False, *_both(1.3, 1.1)),
    Target("prefill's p99 under decode's flood against alone, launches", _flood("launches"), False, *_both(2.0, 1.1)),
    Target("row bandwidth of the distance kernel against a copy's reads and writes",
           _bandwidth, True, Bar(0.35, 0.5), Bar(0.6, 0.75)),
    Target("resident kernel, all at once against launches", _resident(_per_s), True, *_both(0.9, 1.0)),
    Target("resident kernel, p99 of arrivals against launches", _resident(_p99_s), False, *_both(1.0, 0.5)),
    Target("resident kernel, one query alone against launches", _resident(_alone_s), False, *_both(1.0, 0.7)),
)  # fmt: skip
"""Targets of each data set."""

TARGETS = (
    Target("vector through the arena: client's write, µs", _p50_us("write_s"), False, *_both(5.0)),
    Target("vector through the arena: pool's wait and admission, µs", _p50_us("take_s"), False, *_both(5.0)),
    Target("hand-over of KV in order against a plain copy", _handover("in order"), False, *_both(2.0, 1.3)),
    Target("hand-over of KV scattered against a plain copy", _handover("scattered"), False, *_both(2.0, 1.3)),
    Target("hand-over of KV: the host is busy, µs", _handover_host_us, False, *_both(100.0)),
)
"""Targets of the sections that run once."""


def verdicts(results: Results, targets: Sequence[Target] = TARGETS, dim: int = 0) -> list[tuple[str, str, str]]:
    """Return (description, figure with its limits, verdict) for each target. dim: of the vectors."""
    return [_verdict(target, results, target.wide if dim >= WIDE else target.narrow) for target in targets]


def _verdict(target: Target, results: Results, bar: Bar | None) -> tuple[str, str, str]:
    limits = "no bar"
    if bar is not None:
        limits = f"{'≥' if target.least else '≤'} {bar.required:g}" + (f", aim {bar.aim:g}" if bar.aim else "")
    try:
        figure = target.figure(results)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # the section was skipped, failed or has no results
        return target.what, limits, "not measured"
    if bar is None:
        return target.what, f"{figure:.3f}", limits

    def reached(value: float | None) -> bool:
        return value is not None and (figure >= value if target.least else figure <= value)

    verdict = "aim" if reached(bar.aim) else "pass" if reached(bar.required) else "FAIL"
    return target.what, f"{figure:.3f} {limits}", verdict
