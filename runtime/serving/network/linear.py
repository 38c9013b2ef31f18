"""Linear layers whose weights are laid out for few rows, as in decoding.

MKL's float32 product of 1 to 16 rows with a large matrix reaches a fraction of the memory bandwidth (on an AMD EPYC
core 2 rows took longer than 4, at 5 of 23 GB/s). oneDNN with its blocked weights reaches it from 3 rows on and is as
fast as MKL or faster for long prompts, so a model's large layers on CPUs use it. In bfloat16, on a processor with
bfloat16 instructions, they take 1.6 to 2.1 times less time, for 1 to 256 rows.

For few rows memory bandwidth is the limit, and int8 weights halve the bytes of bfloat16 (`Int8Linear`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from runtime.serving.model.model_info import WeightsType
from runtime.serving.network.cpu_kernels import compiled_kernel

_MIN_ROWS = 4  # below it oneDNN's float32 product takes a slower path: padding with zero rows is cheaper
_LAYOUT_ROWS = 16  # batch size that the layout targets; other sizes were no slower than with their own layout
_MIN_PACKED_SIZE = 1 << 18  # a call costs 10 µs more than MKL's: not worth it for weights that fit into a core's cache

Linear = Callable[[torch.Tensor], torch.Tensor]
"""y = x Wᵀ + b: float32 or of W's type [rows, in] → of W's type [rows, out]."""


class PlainLinear:
    """A `Linear` with W unchanged, in float32 or a 16-bit type; the product uses W's type."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.to(self._weight.dtype), self._weight, self._bias)


class PackedLinear:
    """A `Linear` with a copy of W in oneDNN's layout, float32 or bfloat16; the product uses W's type."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._type = weight.dtype
        self._min_rows = _MIN_ROWS if weight.dtype == torch.float32 else 1
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows >= self._min_rows:
            return self._product(x)
        return self._product(functional.pad(x, (0, 0, 0, self._min_rows - rows)))[:rows]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self._type), self._weight, self._bias, "none", [], "")
        return y


# ---- int8 weights for few rows
# W is int8 with one scale per output. x keeps 15 bits: a row is s · (high + low / 254), two int8 rows of one product,
# which reads W once for both. With 8 bits for x, one int8 row, a product of few rows takes as long, and SmolLM2 chose
# 90% of float32's greedy tokens instead of 97%.

_MAX_INT8_ROWS = 16  # the product has twice as many rows; beyond that bfloat16 is as fast
_ROUNDED_AT_ONCE = 1 << 16  # weights: what is computed from them stays in a core's cache
_LOW_STEPS = 254  # steps of `low` per step of `high`: the remainder is at most half a step, so `low` is at most 127


@compiled_kernel("float32[:,::1]", "int8[:,::1]", "float32[::1]")
def split(x: Any, parts: Any, scales: Any) -> None:
    """Quantize x so that x[r] ≈ scales[r] · (parts[r] + parts[rows + r] / 254); scales[r] is NaN if x[r] is not
    finite."""
    rows, inside = x.shape
    for row in range(rows):
        largest, odd = np.float32(1e-30), np.float32(0.0)
        for d in range(inside):
            size = abs(x[row, d])
            largest = max(largest, size)
            odd += size * np.float32(0.0)
        scale = largest / np.float32(127.0)
        inverse = np.float32(1.0) / scale
        for d in range(inside):
            value = x[row, d] * inverse
            high = np.rint(value)
            parts[row, d] = np.int8(high)
            parts[rows + row, d] = np.int8(np.rint((value - high) * np.float32(_LOW_STEPS)))
        scales[row] = scale + odd


@compiled_kernel("float32[:,::1]", "float32[::1]", "float32[:,::1]")
def join(products: Any, scales: Any, y: Any) -> None:
    """Compute y[r] = scales[r] · (products[r] + products[rows + r] / 254)."""
    rows, outside = y.shape
    for row in range(rows):
        for d in range(outside):
            y[row, d] = scales[row] * (products[row, d] + products[rows + row, d] / np.float32(_LOW_STEPS))


class Int8Linear:
    """A `Linear` with int8 weights for up to 16 rows; more rows use the layer `wide`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, wide: Linear) -> None:
        """weight: float32 [out, in]."""
        self._outside, self._bias, self._wide = len(weight), bias, wide
        self._scales, self._zeros = torch.empty(self._outside), torch.zeros(self._outside, dtype=torch.int64)
        rounded = torch.empty(weight.shape, dtype=torch.int8)
        step = max(1, _ROUNDED_AT_ONCE // weight.shape[1])
        for begin in range(0, self._outside, step):
            some = slice(begin, begin + step)
            scales = torch.amax(weight[some].abs(), 1, out=self._scales[some]).clamp_(min=1e-30).div_(127)
            rounded[some] = (weight[some] / scales[:, None]).round_()
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, [1, weight.shape[1]])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inside = x.shape
        if rows > _MAX_INT8_ROWS:
            return self._wide(x)
        parts, scales = torch.empty(2 * rows, inside, dtype=torch.int8), torch.empty(rows)
        split(x.float().numpy(), parts.numpy(), scales.numpy())
        y = torch.empty(rows, self._outside)
        join(self._product(parts).numpy(), scales.numpy(), y.numpy())
        return y if self._bias is None else y.add_(self._bias)

    def _product(self, parts: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            parts, 1.0, 0, self._weight, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y


def linear_layer(weight: torch.Tensor, bias: torch.Tensor | None, weights: WeightsType = "float32") -> Linear:
    """Return the layer with weights float32 [out, in], stored as `weights` if it is large: packed on CPUs where that
    works, and for "int8" with a bfloat16 layer for more rows.

    Small layers stay float32: their weights fit into a core's cache, and converting x would take longer than the
    product."""
    if weight.numel() < _MIN_PACKED_SIZE:
        return PlainLinear(weight, bias)
    dtype = torch.bfloat16 if weights == "int8" else getattr(torch, weights)
    converted, on_cpu = weight.to(dtype), weight.device.type == "cpu"
    wide: Linear = PackedLinear(converted, bias) if on_cpu and packing_works(dtype) else PlainLinear(converted, bias)
    return Int8Linear(weight, bias, wide) if weights == "int8" and int8_works() else wide


@cache
def packing_works(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether oneDNN's product works and is correct: it is an internal operator of torch and may change."""
    atol = 1e-4 if dtype == torch.float32 else 0.5  # sums of 64 products, each rounded by up to 2^-8
    return _works(lambda weight, bias: PackedLinear(weight.to(dtype), bias), atol, 1e-5)


@cache
def int8_works() -> bool:
    """Return whether oneDNN's int8 product works: without int8 instructions, sums of two products may overflow."""
    return _works(lambda weight, bias: Int8Linear(weight, bias, PlainLinear(weight, bias)), 0.3, 0.01)


def _works(layer: Callable[[torch.Tensor, torch.Tensor], Linear], atol: float, rtol: float) -> bool:
    weight, bias = torch.linspace(-1, 1, 32 * 64).view(32, 64), torch.linspace(-1, 1, 32)
    x = torch.linspace(-1, 1, 5 * 64).view(5, 64)
    x[1] = weight[0] = 1.0  # the largest possible sum
    try:
        with torch.inference_mode():
            computed, expected = layer(weight, bias)(x).float(), functional.linear(x, weight, bias)
            return torch.allclose(computed, expected, atol=atol, rtol=rtol)
    except (AttributeError, RuntimeError, TypeError):
        return False
