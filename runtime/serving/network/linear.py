"""Linear layers whose weights are laid out for few rows, as in decoding.

MKL's float32 product of 1 to 16 rows with a large matrix reaches a fraction of the memory bandwidth (on an AMD EPYC
core 2 rows took longer than 4, at 5 of 23 GB/s). oneDNN with its blocked weights reaches it from 3 rows on and is as
fast as MKL or faster for long prompts, so a model's large layers on CPUs use it. In bfloat16, on a processor with
bfloat16 instructions, they take 1.6 to 2.1 times less time, for 1 to 256 rows.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

from runtime.serving.model.model_info import WeightsType

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


def linear_layer(weight: torch.Tensor, bias: torch.Tensor | None, weights: WeightsType = "float32") -> Linear:
    """Return the layer with weights float32 [out, in], stored as `weights` if it is large, and packed on CPUs where
    that works.

    Small layers stay float32: their weights fit into a core's cache, and converting x would take longer than the
    product."""
    if weight.numel() < _MIN_PACKED_SIZE:
        return PlainLinear(weight, bias)
    dtype = getattr(torch, weights)
    packed = weight.device.type == "cpu" and packing_works(dtype)
    return (PackedLinear if packed else PlainLinear)(weight.to(dtype), bias)


@cache
def packing_works(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether oneDNN's product works and is correct: it is an internal operator of torch and may change."""
    weight, bias = torch.linspace(-1, 1, 32 * 64).view(32, 64), torch.linspace(-1, 1, 32)
    x = torch.linspace(-1, 1, 5 * 64).view(5, 64)
    tolerance = 1e-4 if dtype == torch.float32 else 0.5  # sums of 64 products, each rounded by up to 2^-8
    try:
        with torch.inference_mode():
            expected = functional.linear(x, weight, bias)
            return torch.allclose(PackedLinear(weight.to(dtype), bias)(x).float(), expected, atol=tolerance)
    except (AttributeError, RuntimeError, TypeError):
        return False
