"""Utilisation by load, u(X) = min(u_max, (X / X_sat)^α), of search, prefill and decode on one machine, and its plot.

Search: X active slots, u the share of a plain copy's bandwidth (`gpu.roofline`). Prefill: X tokens per pass; decode: X
rows per step; u the share of the highest tokens/s of all measured passes.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpu.roofline import Saturation, SearchRoofline


class PassRoofline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Passes of a model by size: `measured` contains (tokens, seconds), `peak_tokens_s` the best rate."""

    peak_tokens_s: float
    saturation: Saturation
    measured: tuple[tuple[int, float], ...]

    @classmethod
    def fit(cls, tokens: Sequence[int], seconds: Sequence[float]) -> "PassRoofline":
        """Fit a curve. Raises `gpu.InvalidParams` for fewer than two different sizes."""
        rates = [count / taken for count, taken in zip(tokens, seconds, strict=True)]
        peak = max(rates)
        curve = Saturation.fit([float(count) for count in tokens], [rate / peak for rate in rates])
        return cls(peak, curve, tuple(zip(tokens, seconds, strict=True)))


class Roofline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured utilisation by stage; None for stages that were not measured."""

    search: tuple[SearchRoofline, ...] = ()
    prefill: PassRoofline | None = None
    decode: PassRoofline | None = None


def draw_roofline(roofline: Roofline, path: Path) -> bool:
    """Write a PNG with points and curves of every stage. Return False, and write nothing, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    lines: list[tuple[str, Saturation, list[tuple[float, float]]]] = []
    for one in roofline.search:
        points = [(float(m.active), m.nbytes / m.seconds / one.peak_bytes_s) for m in one.measured]
        lines.append((f"search, {one.measured[0].dim} dimensions (X slots)", one.saturation, points))
    for name, passes in (("prefill (X tokens)", roofline.prefill), ("decode (X rows)", roofline.decode)):
        if passes is not None:
            points = [(float(x), x / seconds / passes.peak_tokens_s) for x, seconds in passes.measured]
            lines.append((name, passes.saturation, points))
    for number, (name, curve, points) in enumerate(lines):
        xs = [x for x, _ in points]
        steps = [xs[0] * (xs[-1] / xs[0]) ** (i / 99) for i in range(100)]
        label = f"{name}: u_max {curve.u_max:.2f}, X_sat {curve.x_sat:.3g}, α {curve.alpha:.2f}"
        axes.plot(steps, [curve.at(x) for x in steps], f"C{number}", label=label)
        axes.plot(xs, [u for _, u in points], f"C{number}o")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("X")
    axes.set_ylabel("u(X)")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    return True
