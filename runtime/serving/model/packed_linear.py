"""Linear layers with weights laid out for few rows at a time, which is what decoding does.

MKL's float32 product of 1 to 16 rows with a large matrix reaches a fraction of the memory's speed (on an AMD EPYC core
2 rows took longer than 4, at 5 GB/s of 23). oneDNN with its own blocked weights reaches it from 3 rows on and is as
fast as MKL or faster for long prompts, so the large linear layers of a model on a CPU are replaced by these.
"""

from typing import Any

import torch
from torch.nn.functional import linear, pad

_FEWEST_ROWS = 4  # below it oneDNN takes another, slower path: rows of zeros are cheaper
_LAYOUT_ROWS = (
    16  # the batch that the weights are laid out for; other sizes were no slower than with a layout of theirs
)
_SMALLEST_WEIGHTS = 1 << 18  # a call costs 10 µs more than MKL's: not worth it for weights that stay in a core's cache


class PackedLinear(torch.nn.Module):
    """y = x Wᵀ + b for x float32 [..., rows, in]. Keeps its own copy of W, in oneDNN's order."""

    def __init__(self, source: torch.nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(source.weight.detach(), _LAYOUT_ROWS)
        self._bias = None if source.bias is None else source.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., rows, in] → [..., rows, out]."""
        rows = x.shape[-2]
        if rows >= _FEWEST_ROWS:
            return self._product(x)
        return self._product(pad(x, (0, 0, 0, _FEWEST_ROWS - rows)))[..., :rows, :]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def pack_linears(module: Any) -> None:
    """Replace the large linear layers in `module`, unless this torch or machine cannot do that."""
    if not _works():
        return
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear) and child.weight.numel() >= _SMALLEST_WEIGHTS:
                setattr(parent, name, PackedLinear(child))


def _works() -> bool:
    """Whether oneDNN's product is there and right: torch offers it to its own compiler only, and could change it."""
    probe = torch.nn.Linear(64, 32)
    x = torch.linspace(-1, 1, 5 * 64).view(1, 5, 64)
    try:
        with torch.inference_mode():
            return torch.allclose(PackedLinear(probe)(x), linear(x, probe.weight, probe.bias), atol=1e-4)
    except (AttributeError, RuntimeError, TypeError):
        return False
