"""Utilisation by load, u(X) = min(u_max, (X / X_sat)^α), of search, prefill and decode on one machine.

Search: X active slots, u the share of a plain copy's bandwidth (`gpu.roofline`). Prefill: X tokens per pass; decode: X
rows per step; u the share of the highest tokens/s of all measured passes.
"""

from collections.abc import Sequence

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
