"""The KV cache as one tensor of blocks, and attention over a ragged batch that reads and writes it in place.

```
kv [layers, 2, blocks, kv_heads, block_tokens, head_dim] float32        one batch: the chunks' tokens, end to end
        │  └ 0: K, 1: V                                                  ┌ table 3, 9 ──┬ table 0 ┬ table 5 ─┐
        └ kv[layer, 0, 9] holds positions 16..31 of a table [3, 9],      │ 40..43       │ 17      │ 0..2     │
          in blocks of 16                                                └ a b c d      ┴ e       ┴ f g h    ┘
```

The tokens of all chunks go through the linear layers as one row without padding, so there is nothing that could be
written by mistake. Attention then goes sequence by sequence: single tokens read their blocks in place on a CPU
and all together elsewhere (`Rows`, `GatheredRows`), chunks at position 0 need none, and later chunks
gather theirs into one piece first, which is little beside the chunk's own work.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from ipc.memory.compiled import keep

# ---- what a CPU computes in loops of our own: where torch would go over its numbers several times, or spend more on
# calls than on numbers, as for the few rows of a decode step. They agree with torch's to float32 rounding.


F = TypeVar("F", bound=Callable[..., None])

# Sums may be reordered, so that they fit into vector registers; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}


def compiled_loop(*arguments: str) -> Callable[[F], F]:
    """For arguments of these types; compiled, or read from numba's cache, on import."""

    def compile_it(function: F) -> F:
        dispatcher = njit(fastmath=_FAST, nogil=True, error_model="numpy")(function)
        keep(dispatcher)
        dispatcher.compile(f"void({', '.join(arguments)})")
        dispatcher.disable_compile()
        return cast(F, dispatcher)

    return compile_it


_BLOCKS = "float32[:,:,:,::1]"


@compiled_loop(_BLOCKS, _BLOCKS, "int64[:,::1]", "int64[::1]", _BLOCKS)
def score(query: Any, keys: Any, tables: Any, visible: Any, scores: Any) -> None:
    """scores[r, h, m, p] = query[r, h, m] · (head h's key at position p of table r) for p < visible[r], -inf behind."""
    rows, kv_heads, group, head_dim = query.shape
    size = keys.shape[2]
    for row in range(rows):
        # Block by block and not head by head: a block is one piece of memory, and the longer the piece, the better it
        # is fetched ahead.
        for first in range(0, visible[row], size):
            block = tables[row, first // size]
            tokens = min(size, visible[row] - first)
            for head in range(kv_heads):
                seen = keys[block, head]
                for offset in range(tokens):
                    for member in range(group):
                        total = np.float32(0.0)
                        for d in range(head_dim):
                            total += query[row, head, member, d] * seen[offset, d]
                        scores[row, head, member, first + offset] = total
        scores[row, :, :, visible[row] :] = -np.inf


@compiled_loop(_BLOCKS, _BLOCKS, "int64[:,::1]", "int64[::1]", _BLOCKS)
def mix(weights: Any, values: Any, tables: Any, visible: Any, output: Any) -> None:
    """output[r, h, m] = Σ weights[r, h, m, p] · (head h's value at position p of table r) over p < visible[r]."""
    rows, kv_heads, group, head_dim = output.shape
    size = values.shape[2]
    output[:] = 0.0
    for row in range(rows):
        for first in range(0, visible[row], size):
            block = tables[row, first // size]
            tokens = min(size, visible[row] - first)
            for head in range(kv_heads):
                seen = values[block, head]
                for offset in range(tokens):
                    for member in range(group):
                        weight = weights[row, head, member, first + offset]
                        for d in range(head_dim):
                            output[row, head, member, d] += weight * seen[offset, d]


@compiled_loop(
    "float32[:,:,::1]",
    "float32[:,:]",
    "float32[:,:]",
    "int64[:]",
    "int64[:]",
    "float32[:,:,:,::1]",
    "float32[:,:,:,::1]",
)
def turn_and_store(projected: Any, cosines: Any, sines: Any, blocks: Any, offsets: Any, keys: Any, values: Any) -> None:
    """projected [tokens, queries | keys | values, head_dim]: queries and keys are turned in place by cosines and sines
    [tokens, head_dim], both halves of which are equal; then keys and values go to their places in the cache."""
    tokens, heads, head_dim = projected.shape
    kv_heads, half = keys.shape[1], head_dim // 2
    for token in range(tokens):
        for head in range(heads - kv_heads):
            for d in range(half):
                cosine, sine = cosines[token, d], sines[token, d]
                first, second = projected[token, head, d], projected[token, head, half + d]
                projected[token, head, d] = first * cosine - second * sine
                projected[token, head, half + d] = second * cosine + first * sine
        block, offset = blocks[token], offsets[token]
        for head in range(kv_heads):
            for d in range(head_dim):
                keys[block, head, offset, d] = projected[token, heads - 2 * kv_heads + head, d]
                values[block, head, offset, d] = projected[token, heads - kv_heads + head, d]


# ---- attention of single decode tokens, each over its own blocks: one call for all rows
# `Rows`: in place, on one CPU core. torch's kernel takes one row at a time here (the rows are of different lengths and
# lie apart) and multiplies matrices that have as many rows as query heads share a KV head, 2 or 3. Two plain loops
# around torch's softmax take a half to a third of its time; they agree with it to float32 rounding.
#
# `GatheredRows`: in torch alone, for any device, over copies of what the rows see. Keys and values are gathered into
# one padded tensor, and torch's kernel takes them with a mask. That moves each of them twice, which a kernel of one's
# own would not.


class Rows:
    """Which blocks each of some tokens sees, and how many positions of them: shared by all layers."""

    def __init__(self, rows: Sequence[tuple[Sequence[int], int]], block_tokens: int) -> None:
        """`rows` are (block table, visible positions); a table may be longer than what is visible."""
        self._visible: NDArray[np.int64] = np.array([visible for _, visible in rows], np.int64)
        self._longest = int(self._visible.max())
        self._tables: NDArray[np.int64] = np.zeros((len(rows), -(-self._longest // block_tokens)), np.int64)
        for line, (table, visible) in zip(self._tables, rows, strict=True):
            count = -(-visible // block_tokens)
            line[:count] = table[:count]

    def attend(self, query: torch.Tensor, keys: NDArray[Any], values: NDArray[Any], scaling: float) -> torch.Tensor:
        """query [rows, kv_heads, group, head_dim], keys and values [blocks, kv_heads, block_tokens, head_dim], all
        float32 and contiguous, written at every position that is seen. Returns the shape of `query`."""
        scores = query.new_empty(*query.shape[:3], self._longest)
        score(query.numpy(), keys, self._tables, self._visible, scores.numpy())
        weights = torch.softmax(scores.mul_(scaling), -1)
        output = torch.empty_like(query)
        mix(weights.numpy(), values, self._tables, self._visible, output.numpy())
        return output


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


Kernels = Literal["cpu", "torch"]
"""How attention is computed: by loops for a CPU, or by torch alone, as it must be on other devices."""
_PIECE_TOKENS = 64  # on a CPU, of a chunk: 15 to 37% faster than uncut chunks of 512

Span = tuple[Sequence[int], int, int]
"""A chunk's block table, start position and number of tokens."""


class PagedCache:
    """The tensor `kv` and its views by layer."""

    def __init__(self, kv: torch.Tensor, kernels: Kernels) -> None:
        self.kv = kv
        self.kernels = kernels
        self.block_tokens = int(kv.shape[4])
        # K and V of each layer, as tensors [blocks, kv_heads, block_tokens, head_dim] …
        self.layers = [(layer[0], layer[1]) for layer in kv]
        # … seen as [blocks, block_tokens, kv_heads, head_dim], so that tokens can be written by (block, offset) …
        self.by_position = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self.layers]
        # … and as the rows' attention wants them.
        self.for_rows: list[tuple[Any, Any]] = self.by_position
        if kernels == "cpu":
            self.for_rows = [(keys.numpy(), values.numpy()) for keys, values in self.layers]


@dataclass(frozen=True)
class _Chunk:
    """Tokens `begin:end` of the batch see themselves, or what is in `blocks` where these are set."""

    begin: int
    end: int
    blocks: torch.Tensor | None
    pieces: "tuple[_Piece, ...]"


@dataclass(frozen=True)
class _Piece:
    """Tokens `begin:end` of the batch see the first `visible` positions; `mask` [end - begin, visible] or causal."""

    begin: int
    end: int
    visible: int
    mask: torch.Tensor | None


class PagedBatch:
    """Where the tokens of one forward pass lie: shared by all layers."""

    def __init__(self, cache: PagedCache, spans: Sequence[Span], tokens: Sequence[int]) -> None:
        """The spans have been checked against the cache's shape; `tokens` are theirs, end to end."""
        self.cache = cache
        device, size = cache.kv.device, cache.block_tokens
        uploads = Uploads()
        blocks: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        rows: list[tuple[Sequence[int], int]] = []
        row_tokens: list[int] = []
        chunks: list[tuple[int, int, int, slice | None]] = []
        for table, start, count in spans:
            begin = len(positions)
            positions += range(start, start + count)
            blocks += [table[position // size] for position in range(start, start + count)]
            last.append(begin + count - 1)
            if count == 1:
                rows.append((table, start + 1))
                row_tokens.append(begin)
            else:
                seen = uploads.add(table[: -(-(start + count) // size)]) if start else None
                chunks.append((begin, start, count, seen))
        where = [uploads.add(values) for values in (tokens, positions, blocks, last, row_tokens)]
        longest = max((visible for _, visible in rows), default=0)
        width = -(-longest // size)
        if cache.kernels == "torch":
            padded = uploads.add(block for table, _ in rows for block in (*table, *[0] * width)[:width])
            visible = uploads.add(visible for _, visible in rows)
        sent = uploads.send(device)
        self.tokens, self.positions, in_block, self.last, self.row_tokens = (sent[part] for part in where)
        self.places = (in_block, self.positions % size)
        self.rows: Rows | GatheredRows | None = None
        if rows and cache.kernels == "cpu":
            self.rows = Rows(rows, size)
        elif rows:
            self.rows = GatheredRows(sent[padded].view(len(rows), width), sent[visible], longest, size)
        cut = _PIECE_TOKENS if cache.kernels == "cpu" else None
        self.chunks = [
            _Chunk(
                begin,
                begin + count,
                None if seen is None else sent[seen],
                tuple(_pieces(begin, start, count, device, cut)),
            )
            for begin, start, count, seen in chunks
        ]

    @classmethod
    def of_rows(cls, cache: PagedCache, numbers: torch.Tensor) -> Self:
        """A batch of single tokens, of which only the device knows: numbers int64 [rows, 2 + blocks] are token,
        position and block table of each row. For kernels of the kind "torch"; nothing here waits for the device."""
        batch, size = cls.__new__(cls), cache.block_tokens
        batch.cache = cache
        batch.tokens, batch.positions, tables = numbers[:, 0], numbers[:, 1], numbers[:, 2:]
        in_block = tables.gather(1, batch.positions[:, None] // size).squeeze(1)
        batch.places = (in_block, batch.positions % size)
        batch.last = batch.row_tokens = torch.arange(len(numbers), device=numbers.device)
        batch.rows = GatheredRows(tables, batch.positions + 1, size * tables.shape[1], size)
        batch.chunks = []
        return batch


def _pieces(begin: int, start: int, count: int, device: torch.device, cut: int | None) -> Iterator[_Piece]:
    """The pieces of one chunk, of `cut` tokens if that is given: with torch's own causal mask where it fits, else one.

    torch's kernels compute most of what a mask hides too, their own causal one included. Cutting leaves it out.
    """
    size = cut or count
    for done in range(0, count, size):
        tokens = min(size, count - done)
        visible = start + done + tokens
        mask = None
        if start + done and tokens > 1:
            mask = torch.ones(tokens, visible, dtype=torch.bool, device=device).tril_(start + done)
        yield _Piece(begin + done, begin + done + tokens, visible, mask)


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines float32 [tokens, head_dim], by which queries and keys are turned."""


def turn(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """`heads` float32 [tokens, heads, head_dim], each turned by its token's angles."""
    cosines, sines = (side[:, None] for side in angles)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def attend(
    batch: PagedBatch, layer: int, projected: torch.Tensor, angles: Angles, kv_heads: int, scaling: float
) -> torch.Tensor:
    """One layer's attention: `projected` float32 [tokens, heads + 2 · kv_heads, head_dim] has each token's queries,
    keys and values; it is changed.

    Turns queries and keys, writes K and V into the blocks, then attends. Returns [tokens, heads, head_dim].
    """
    cache, group = batch.cache, projected.shape[1] // kv_heads - 2
    heads, head_dim = kv_heads * group, projected.shape[2]
    query, key, value = projected[:, :heads], projected[:, heads:-kv_heads], projected[:, -kv_heads:]
    if cache.kernels == "cpu":
        (cosines, sines), (blocks, offsets) = angles, batch.places
        keys, values = cache.for_rows[layer]
        turn_and_store(projected.numpy(), cosines.numpy(), sines.numpy(), blocks.numpy(), offsets.numpy(), keys, values)
    else:
        projected[:, :-kv_heads] = turn(projected[:, :-kv_heads], angles)
        for stored, new in zip(cache.by_position[layer], (key, value), strict=True):
            stored.index_put_(batch.places, new)

    output = query.new_empty(*query.shape)
    if batch.rows:
        # A single token sees all there is, so the query heads of a group can stand where several tokens would.
        alone = query[batch.row_tokens] if batch.chunks else query.contiguous()
        attended = batch.rows.attend(alone.view(-1, kv_heads, group, head_dim), *cache.for_rows[layer], scaling)
        if not batch.chunks:
            return attended.view(-1, heads, head_dim)
        output[batch.row_tokens] = attended.view(-1, heads, head_dim)
    queries, fresh = _by_head(query), (_by_head(key), _by_head(value))
    for chunk in batch.chunks:
        keys, values = _seen(chunk, cache.layers[layer], *fresh)
        for piece in chunk.pieces:
            attended = scaled_dot_product_attention(
                queries[:, :, piece.begin : piece.end],
                keys[:, :, : piece.visible],
                values[:, :, : piece.visible],
                attn_mask=piece.mask,
                is_causal=piece.mask is None and piece.end - piece.begin > 1,
                scale=scaling,
                enable_gqa=heads != kv_heads,
            )
            output[piece.begin : piece.end] = attended[0].transpose(0, 1)
    return output


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] → [1, heads, tokens, head_dim], as torch's kernel takes it."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _seen(
    chunk: _Chunk, stored: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that a chunk sees, [1, kv_heads, positions, head_dim], in order."""
    if chunk.blocks is None:
        return key[:, :, chunk.begin : chunk.end], value[:, :, chunk.begin : chunk.end]
    # The blocks first: `index_select` along another dimension would copy the whole layer, to have it in that order.
    keys, values = (side.index_select(0, chunk.blocks).transpose(0, 1).flatten(1, 2).unsqueeze(0) for side in stored)
    return keys, values


class Uploads:
    """`add` lists, `send` them once, and take them out as views of one int64 tensor."""

    def __init__(self) -> None:
        self._values: list[int] = []

    def add(self, values: Iterable[int]) -> slice:
        """Where in what `send` returns these values will be."""
        begin = len(self._values)
        self._values += values
        return slice(begin, len(self._values))

    def send(self, device: torch.device) -> torch.Tensor:
        """All that was added, on the device. A copy from pageable memory would wait for the device's whole queue."""
        values = torch.tensor(self._values, dtype=torch.int64)
        if device.type == "cpu":
            return values
        return values.pin_memory().to(device, non_blocking=True)
