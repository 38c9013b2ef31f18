"""Attention of single decode tokens in torch alone, for any device: all rows at once, over copies of what they see.

The keys and values that a row sees are gathered into one padded tensor, and torch's kernel takes them with a mask. That
moves each of them twice, which a kernel of one's own would not; on a CPU `row_attention.py` is that kernel.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


class GatheredRows:
    """Which positions each of some tokens sees: shared by all layers."""

    def __init__(self, tables: torch.Tensor, visible: torch.Tensor, longest: int, block_tokens: int) -> None:
        """tables int64 [rows, blocks], padded with anything; visible int64 [rows], at most `longest`."""
        positions = torch.arange(longest, device=tables.device)
        seen = positions < visible[:, None]
        # Behind what it sees a row reads its first position again: what was never written could be NaN, and NaN passes
        # through a mask.
        inside = torch.where(seen, positions, 0)
        self._blocks = tables.gather(1, inside // block_tokens)
        self._offsets = inside % block_tokens
        self._mask = seen[:, None, None, :]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """query [rows, kv_heads, group, head_dim], keys and values [blocks, block_tokens, kv_heads, head_dim]. Returns
        the shape of `query`."""
        seen_keys, seen_values = (side[self._blocks, self._offsets].transpose(1, 2) for side in (keys, values))
        return scaled_dot_product_attention(query, seen_keys, seen_values, attn_mask=self._mask, scale=scaling)
