"""CUDA graphs of decode passes: a decode step is one launch instead of some dozens per layer.

A graph is captured for a number of rows, rounded up to a bucket. The batch is padded with copies of its last row, which
write the same values as that row. Where attention gathers blocks, a graph is also specific to a number of blocks per
row; in-place attention reads only the blocks that a row has. A graph is captured at the first use of its bucket and
replayed afterwards: all its inputs are one integer tensor, which is uploaded for each step from pinned memory that the
graph keeps (a pass is complete before the next one writes to it).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.cuda_graphs import Capture, Captured, CudaCapture
from runtime.serving.network.decode_attention import GatheredAttention, PagedAttention, power_of_two
from runtime.serving.network.llama import Llama
from runtime.serving.network.paged_cache import PagedBatch, PagedCache, Span

log = logging.getLogger("model")

_MIN_TOKENS = 256  # smallest bucket of tokens per row
_MIN_ROWS = 2  # smallest bucket of rows: programs are compiled for 2 or more tokens


@dataclass
class _Graph:
    """A captured pass, its input on the device and the same in pinned memory, and the blocks in each of its lines."""

    sent: torch.Tensor
    numbers: torch.Tensor
    blocks: list[list[int]]
    captured: Captured | None = None

    @classmethod
    def of(cls, rows: int, width: int, device: torch.device) -> "_Graph":
        numbers = torch.zeros(rows, 2 + width, dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(numbers.to(device), numbers, [[]] * rows)

    def write(self, spans: Sequence[Span], tokens: Sequence[int], block_tokens: int) -> None:
        """Queue the upload of a step. Most rows keep their blocks: only their token and position are written."""
        lines: NDArray[np.int64] = self.numbers.numpy()
        for row, ((table, start, _), token) in enumerate(zip(spans, tokens, strict=True)):
            lines[row, 0], lines[row, 1] = token, start
            blocks = list(table[: start // block_tokens + 1])
            if blocks != self.blocks[row]:
                lines[row, 2 : 2 + len(blocks)] = self.blocks[row] = blocks
        count = len(spans)
        lines[count:] = lines[count - 1]
        self.blocks[count:] = [self.blocks[count - 1]] * (len(lines) - count)
        used = 2 + max(map(len, self.blocks))  # columns beyond are not read
        self.sent[:, :used].copy_(self.numbers[:, :used], non_blocking=True)


class DecodeGraphs:
    """The graphs of one network over one cache, by bucket."""

    def __init__(self, network: Llama, cache: PagedCache, capture: Capture | None = None) -> None:
        """`capture`: CUDA graph capture by default."""
        self._network, self._cache = network, cache
        self._capture = capture or CudaCapture()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._min_blocks = -(-_MIN_TOKENS // cache.block_tokens)

    def logits(self, spans: Sequence[Span], tokens: Sequence[int]) -> torch.Tensor:
        """Return `Llama.logits` of spans of one token each: float32 [rows, vocabulary], valid until the next call.

        Raises torch's error if a pass cannot be captured.
        """
        size = self._cache.block_tokens
        rows, needed = max(_MIN_ROWS, power_of_two(len(spans))), max(start // size + 1 for _, start, _ in spans)
        width = self._cache.row_blocks
        if self._cache.kernels == "gathered":
            width = power_of_two(max(self._min_blocks, needed))
        graph = self._graphs.get((rows, width))
        if graph is None:
            graph = self._graphs[rows, width] = _Graph.of(rows, width, self._cache.kv.device)
        graph.write(spans, tokens, size)
        if graph.captured is None:
            sent = graph.sent
            graph.captured = self._capture(lambda: self._network.logits(PagedBatch.of_rows(self._cache, sent)))
        graph.captured.replay()
        logits: torch.Tensor = graph.captured.output
        return logits[: len(spans)]


def supports_paged_attention(
    kv: torch.Tensor, row_blocks: int, group: int, scratch: Sequence[int], capture: Capture | None = None
) -> bool:
    """Return whether `PagedAttention` works for this cache [layers, 2, blocks, kv_heads, block_tokens, head_dim], of
    which a row has at most `row_blocks` blocks: torch compiles it, a GPU can capture it, and its result is correct.

    FlexAttention needs a compiler and may change between versions of torch. If it does not work, the reason is logged.
    Writes to the blocks `scratch` of the cache and leaves zeros; never raises. `capture`: by default CUDA graph capture
    on a GPU, and none elsewhere.
    """
    used, (kv_heads, size, head_dim) = list(scratch)[:row_blocks], kv.shape[3:]
    blocks = len(used)
    if size < 16 or size & (size - 1) or head_dim < 16:
        log.info(
            "attention uses gathered blocks: FlexAttention has no kernel for %d-token blocks and %d-dim heads",
            size, head_dim,
        )  # fmt: skip
        return False
    random = torch.Generator().manual_seed(0)
    keys, values = kv[0]
    query = torch.randn(2, kv_heads, group, head_dim, generator=random).to(kv.device, kv.dtype)
    tables = torch.tensor([used, used[::-1]], device=kv.device)
    visible = torch.tensor([3, blocks * size - 2], device=kv.device)
    scaling, near = head_dim**-0.5, 1e-4 if kv.dtype == torch.float32 else 0.05

    def paged() -> torch.Tensor:
        return PagedAttention(tables, visible, row_blocks, kv_heads, size).attend(query, keys, values, scaling)

    try:
        if capture is None and kv.device.type == "cuda":
            capture = CudaCapture()
        with torch.inference_mode():
            captured = capture(paged) if capture else None
            for side in (keys, values):  # after the capture: the graph reads them at replay
                side[used] = torch.randn(blocks, kv_heads, size, head_dim, generator=random).to(kv.device, kv.dtype)
            if captured:
                captured.replay()
            output = captured.output if captured else paged()
            expected = GatheredAttention(tables, visible, blocks * size, size).attend(query, keys, values, scaling)
            right = torch.allclose(output.float(), expected.float(), rtol=near, atol=near)
        reason = "" if right else "returned a wrong result"
    except Exception as error:  # a missing compiler, another version of torch: anything
        reason = f"failed: {str(error)[:300]}"
    finally:
        kv[0][:, used] = 0
    if reason:
        log.warning("attention uses gathered blocks: FlexAttention on %s %s", kv.device, reason)
    return not reason
