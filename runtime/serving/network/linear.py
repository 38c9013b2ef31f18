"""Linear layers with weights laid out for few rows at a time, which is what decoding does.

MKL's float32 product of 1 to 16 rows with a large matrix reaches a fraction of the memory's speed (on an AMD EPYC core
2 rows took longer than 4, at 5 GB/s of 23). oneDNN with its own blocked weights reaches it from 3 rows on and is as
fast as MKL or faster for long prompts, so the large linear layers of a model on a CPU are these. In bfloat16, on a
processor that multiplies it, they take 1.6 to 2.1 times less, for 1 to 256 rows.

For few rows the memory's speed is all there is, and weights in int8 are half of bfloat16's (`Int8Linear`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from runtime.serving.model.model_info import WeightsType
from runtime.serving.network.cpu_kernels import compiled_kernel

_FEWEST_ROWS = 4  # below it oneDNN's float32 product takes another, slower path: rows of zeros are cheaper
_LAYOUT_ROWS = 16  # the batch that weights are laid out for; other sizes were no slower than with a layout of theirs
_SMALLEST_WEIGHTS = 1 << 18  # a call costs 10 µs more than MKL's: not worth it for weights that stay in a core's cache

Linear = Callable[[torch.Tensor], torch.Tensor]
"""y = x Wᵀ + b: float32 or of W's type [rows, in] → of W's type [rows, out]."""


class PlainLinear:
    """A `Linear` that keeps W as it is, float32 or half as wide; x is multiplied in W's type."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.to(self._weight.dtype), self._weight, self._bias)


class PackedLinear:
    """A `Linear` that keeps its own copy of W, float32 or bfloat16, in oneDNN's order; x is multiplied in W's type."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._type = weight.dtype
        self._fewest_rows = _FEWEST_ROWS if weight.dtype == torch.float32 else 1
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows >= self._fewest_rows:
            return self._product(x)
        return self._product(functional.pad(x, (0, 0, 0, self._fewest_rows - rows)))[:rows]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self._type), self._weight, self._bias, "none", [], "")
        return y


# ---- int8 weights for few rows
# W is int8, each output's weights by a scale of their own. x keeps 15 bits: a row is s · (high + low / 254), two rows
# of int8 of one and the same product, which reads W once for both. With x of 8 bits, one row of int8, a product of few
# rows would take as long, and SmolLM2 chose 90% of float32's greedy tokens instead of 97%.

_MOST_ROWS = 16  # twice as many are multiplied; with more of them bfloat16 is as fast
_FINER = 254  # steps of `low` in one of `high`: a rest is at most half of one, and at most 127


@compiled_kernel("float32[:,::1]", "int8[:,::1]", "float32[::1]")
def split(x: Any, parts: Any, scales: Any) -> None:
    """x[r] = scales[r] · (parts[r] + parts[rows + r] / 254), but for rounding; scales[r] is NaN where x[r] is not
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
            parts[rows + row, d] = np.int8(np.rint((value - high) * np.float32(_FINER)))
        scales[row] = scale + odd


@compiled_kernel("float32[:,::1]", "float32[::1]", "float32[:,::1]")
def join(products: Any, scales: Any, y: Any) -> None:
    """y[r] = scales[r] · (products[r] + products[rows + r] / 254)."""
    rows, outside = y.shape
    for row in range(rows):
        for d in range(outside):
            y[row, d] = scales[row] * (products[row, d] + products[rows + row, d] / np.float32(_FINER))


class Int8Linear:
    """A `Linear` of int8 weights for up to 16 rows, and `wide` for more."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, wide: Linear) -> None:
        """weight: float32 [out, in]."""
        self._outside, self._bias, self._wide = len(weight), bias, wide
        self._scales = weight.abs().amax(1).clamp_(min=1e-30) / 127
        self._zeros = torch.zeros(self._outside, dtype=torch.int64)
        rounded = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, [1, weight.shape[1]])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inside = x.shape
        if rows > _MOST_ROWS:
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
    """The layer with weights float32 [out, in], kept as `weights` says if they are large; on a CPU that can do it
    packed, and "int8" beside bfloat16 for more rows.

    Small ones stay float32: they come from a core's cache, and converting x would take longer than they do."""
    if weight.numel() < _SMALLEST_WEIGHTS:
        return PlainLinear(weight, bias)
    dtype = torch.bfloat16 if weights == "int8" else getattr(torch, weights)
    kept, on_cpu = weight.to(dtype), weight.device.type == "cpu"
    wide: Linear = PackedLinear(kept, bias) if on_cpu and packing_works(dtype) else PlainLinear(kept, bias)
    return Int8Linear(weight, bias, wide) if weights == "int8" and int8_works() else wide


@cache
def packing_works(dtype: torch.dtype = torch.float32) -> bool:
    """Whether oneDNN's product is there and right: torch offers it to its own compiler only, and could change it."""
    weight, bias = torch.linspace(-1, 1, 32 * 64).view(32, 64), torch.linspace(-1, 1, 32)
    x = torch.linspace(-1, 1, 5 * 64).view(5, 64)
    near = 1e-4 if dtype == torch.float32 else 0.5  # of sums of 64 products, each rounded by up to 2^-8
    try:
        with torch.inference_mode():
            expected = functional.linear(x, weight, bias)
            return torch.allclose(PackedLinear(weight.to(dtype), bias)(x).float(), expected, atol=near)
    except (AttributeError, RuntimeError, TypeError):
        return False


@cache
def int8_works() -> bool:
    """The same of its product in int8: without instructions for it sums of two products may overflow."""
    weight, bias = torch.linspace(-1, 1, 32 * 64).view(32, 64), torch.linspace(-1, 1, 32)
    x = torch.linspace(-1, 1, 5 * 64).view(5, 64)
    x[1] = weight[0] = 1.0  # the largest sum that there is
    try:
        with torch.inference_mode():
            found = Int8Linear(weight, bias, PlainLinear(weight, bias))(x)
            return torch.allclose(found, functional.linear(x, weight, bias), atol=0.3, rtol=0.01)
    except (AttributeError, RuntimeError, TypeError):
        return False
