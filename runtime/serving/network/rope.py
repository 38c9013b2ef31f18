"""Rotary position embedding (RoFormer, arXiv 2104.09864): how far each pair of a head's dimensions turns a position.

Four variants, all of whose angles depend on a token's position alone: "default", "linear" (positions divided by a
factor), "llama3" (only slow frequencies are, Llama 3.1) and "yarn" (arXiv 2309.00071). Keys as in a transformers
`config.json`.
"""

import math
from typing import Any

import torch

from runtime.errors import ModelError


class Rope:
    """Turns queries and keys by their positions. Both halves of a head's dimensions form the pairs, as in Llama."""

    def __init__(self, config: dict[str, Any], head_dim: int, device: str) -> None:
        """`config`: the model's `config.json`. Raises `ModelError` for parameters that are missing or no numbers."""
        found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        found.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        try:
            frequencies, self._scale = _frequencies(found, head_dim)
            if not frequencies.isfinite().all():
                raise ValueError("an angle that is no number")
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"config.json's RoPE parameters {found} cannot be used: {error!r}") from error
        self._frequencies = frequencies.to(device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines float32 [tokens, 1, head_dim] for `turn`, of positions int64 [tokens]."""
        half = positions[:, None, None].float() * self._frequencies
        both = torch.cat((half, half), dim=-1)
        return both.cos() * self._scale, both.sin() * self._scale


def turn(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """`heads` float32 [tokens, heads, head_dim], each turned by its token's angles."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def _frequencies(rope: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians a position float32 [head_dim / 2], and what cosines and sines are multiplied with."""
    base = float(rope["rope_theta"])
    periods = base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    plain = 1.0 / periods
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return plain, 1.0
        case "linear":
            return plain / float(rope["factor"]), 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(periods, rope, head_dim, base)
        case kind:
            raise ValueError(f"unknown type {kind!r}")


def _llama3(plain: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Slow frequencies are divided, fast ones stay, those between are mixed."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > trained / low, plain / factor, plain)
    share = (trained / wavelength - low) / (high - low)
    mixed = (1 - share) * slowed / factor + share * slowed
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, mixed, slowed)


def _yarn(periods: torch.Tensor, rope: dict[str, Any], head_dim: int, base: float) -> tuple[torch.Tensor, float]:
    """Fast frequencies stay, slow ones are divided, with a ramp between; attention is sharpened a little."""
    factor, trained = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    scale = rope.get("attention_factor")
    if scale is None:
        above, below = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = _sharpened(factor, above) / _sharpened(factor, below) if above and below else _sharpened(factor, 1.0)

    def dimension(turns: float) -> float:
        """Which pair turns so often within the trained context."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    begin, end = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - begin) / (end - begin or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return (1 / (factor * periods)) * (1 - kept) + (1 / periods) * kept, float(scale)


def _sharpened(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
