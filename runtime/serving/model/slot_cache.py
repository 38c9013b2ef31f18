"""The KV cache as one tensor of slots, and attention over a ragged batch that reads and writes it in place.

```
kv [layers, 2, slots, kv_heads, context, head_dim] float32          one batch: the chunks' tokens, end to end
        │  └ 0: K, 1: V                                             ┌ slot 3 ──────┬ slot 0 ┬ slot 5 ─┐
        └ kv[layer, 0, slot, :, :end] is a view: what a chunk reads │ 40..43       │ 17     │ 0..2    │  positions
                                                                    └ a b c d      ┴ e      ┴ f g h   ┘  tokens [1, 8]
```

The tokens of all chunks go through the linear layers as one row without padding, so there is nothing that could be
written by mistake. Attention then runs over views of the slots, each as long as its own sequence: on a CPU that is 3 to
9 times faster than gathering the rows into one padded batch, which copies all of K and V in every layer of every step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from runtime.serving.model.row_attention import Rows

ATTENTION = "trinity_slots"
_MASKED_TOKENS = 64  # the size of pieces with a mask: 15 to 30% faster than uncut chunks of 512


class SlotCache:
    """The tensor `kv` and its views by layer.

    With `one_core`, single tokens are attended by the kernel for one core; otherwise torch shares out their heads.
    """

    def __init__(self, kv: torch.Tensor, *, one_core: bool) -> None:
        self.kv = kv
        self.one_core = one_core
        # K and V of each layer, as tensors [slots, kv_heads, context, head_dim] …
        self.layers = [(layer[0], layer[1]) for layer in kv]
        # … seen as [slots, context, kv_heads, head_dim], so that tokens can be written by (slot, position) …
        self.by_position = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self.layers]
        # … and as arrays.
        self.arrays = [(keys.numpy(), values.numpy()) for keys, values in self.layers] if one_core else []


@dataclass(frozen=True)
class _Piece:
    """Tokens `begin:end` of the batch belong to `slot`, and see its first `visible` positions.

    `mask` [end - begin, visible] is set only for several tokens that do not start at position 0.
    """

    slot: int
    begin: int
    end: int
    visible: int
    mask: torch.Tensor | None


class SlotBatch:
    """Where the tokens of one forward pass lie: shared by all layers."""

    def __init__(self, cache: SlotCache, spans: Sequence[tuple[int, int, int]]) -> None:
        """`spans` are (slot, start position, number of tokens), already checked against the cache's shape."""
        self.cache = cache
        device = cache.kv.device
        slots: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        rows: list[_Piece] = []
        self.pieces: list[_Piece] = []
        for slot, start, count in spans:
            begin = len(positions)
            slots += [slot] * count
            positions += range(start, start + count)
            last.append(begin + count - 1)
            if count == 1 and cache.one_core:
                rows.append(_Piece(slot, begin, begin + 1, start + 1, None))
            else:
                self.pieces += _pieces(slot, begin, start, count, device)
        self.positions = torch.tensor(positions, device=device)
        self.places = (torch.tensor(slots, device=device), self.positions)
        self.last = torch.tensor(last, device=device)
        self.rows = Rows([row.slot for row in rows], [row.visible for row in rows]) if rows else None
        self.row_tokens = torch.tensor([row.begin for row in rows], device=device)


def _pieces(slot: int, begin: int, start: int, count: int, device: torch.device) -> Iterator[_Piece]:
    """The pieces of one chunk: a single one where torch's own causal mask fits, else a few with masks of their own.

    A masked kernel computes what the mask hides too. Cutting a chunk leaves most of that out.
    """
    size = _MASKED_TOKENS if start else count
    for done in range(0, count, size):
        tokens = min(size, count - done)
        visible = start + done + tokens
        mask = None
        if start and tokens > 1:
            mask = torch.ones(tokens, visible, dtype=torch.bool, device=device).tril_(start + done)
        yield _Piece(slot, begin + done, begin + done + tokens, visible, mask)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    slot_batch: SlotBatch,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention: query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim].

    Writes K and V into the slots, then attends. Returns [1, tokens, heads, head_dim].
    """
    layer: int = module.layer_idx
    cache = slot_batch.cache
    for stored, new in zip(cache.by_position[layer], (key, value), strict=True):
        stored.index_put_(slot_batch.places, new[0].transpose(0, 1))

    heads, tokens, head_dim = query.shape[1:]
    output = query.new_empty(tokens, heads, head_dim)
    if slot_batch.rows:
        # A single token sees all there is, so the query heads of a group can stand where several tokens would.
        kv_heads = key.shape[1]
        folded = query[0].transpose(0, 1)[slot_batch.row_tokens].view(-1, kv_heads, heads // kv_heads, head_dim)
        attended = slot_batch.rows.attend(folded, *cache.arrays[layer], scaling)
        output[slot_batch.row_tokens] = attended.view(-1, heads, head_dim)
    keys, values = cache.layers[layer]
    for piece in slot_batch.pieces:
        chunk = scaled_dot_product_attention(
            query[:, :, piece.begin : piece.end],
            keys[piece.slot : piece.slot + 1, :, : piece.visible],
            values[piece.slot : piece.slot + 1, :, : piece.visible],
            attn_mask=piece.mask,
            is_causal=piece.mask is None and piece.end - piece.begin > 1,
            scale=scaling,
            enable_gqa=heads != key.shape[1],
        )
        output[piece.begin : piece.end] = chunk[0].transpose(0, 1)
    return output.unsqueeze(0), None


# No mask function is registered under this name, so transformers builds no mask of its own.
AttentionInterface.register(ATTENTION, _attend)
