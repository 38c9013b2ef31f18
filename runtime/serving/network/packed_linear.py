"""Linear layers with weights laid out for few rows at a time, which is what decoding does.

MKL's float32 product of 1 to 16 rows with a large matrix reaches a fraction of the memory's speed (on an AMD EPYC core
2 rows took longer than 4, at 5 GB/s of 23). oneDNN with its own blocked weights reaches it from 3 rows on and is as
fast as MKL or faster for long prompts, so the large linear layers of a model on a CPU are these.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

_FEWEST_ROWS = 4  # below it oneDNN takes another, slower path: rows of zeros are cheaper
_LAYOUT_ROWS = (
    16  # the batch that the weights are laid out for; other sizes were no slower than with a layout of theirs
)
_SMALLEST_WEIGHTS = 1 << 18  # a call costs 10 µs more than MKL's: not worth it for weights that stay in a core's cache

Linear = Callable[[torch.Tensor], torch.Tensor]
"""y = x Wᵀ + b for x float32 [rows, in]: [rows, in] → [rows, out]."""


class PlainLinear:
    """A `Linear` that keeps W as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A `Linear` that keeps its own copy of W, in oneDNN's order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows >= _FEWEST_ROWS:
            return self._product(x)
        return self._product(functional.pad(x, (0, 0, 0, _FEWEST_ROWS - rows)))[:rows]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def linear_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The layer with weights float32 [out, in]: packed if they are large and on a CPU that can do it."""
    if weight.device.type == "cpu" and weight.numel() >= _SMALLEST_WEIGHTS and packing_works():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


@cache
def packing_works() -> bool:
    """Whether oneDNN's product is there and right: torch offers it to its own compiler only, and could change it."""
    weight, bias = torch.linspace(-1, 1, 32 * 64).view(32, 64), torch.linspace(-1, 1, 32)
    x = torch.linspace(-1, 1, 5 * 64).view(5, 64)
    try:
        with torch.inference_mode():
            return torch.allclose(PackedLinear(weight, bias)(x), functional.linear(x, weight, bias), atol=1e-4)
    except (AttributeError, RuntimeError, TypeError):
        return False
