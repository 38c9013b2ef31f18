"""Passes of single tokens as captured CUDA graphs: a decode step is one launch instead of some dozens a layer.

A graph is of a number of rows, rounded up to a bucket; what is missing of the rows is the last one again, which writes
what that one writes. Where attention gathers blocks a graph is of a number of blocks that a row may see, too; reading
them in place takes the time of those that there are. A graph is captured when its bucket is first wanted, and then
replayed: all its inputs are one tensor of integers, which is sent anew for each step.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from runtime.serving.network.paged_cache import PagedBatch, PagedCache, Span
from runtime.serving.network.row_attention import GatheredRows, PagedRows, power_of_two

log = logging.getLogger("model")

_FEWEST_TOKENS = 256  # that a row's blocks hold at least


class Network(Protocol):
    """What runs a batch: `runtime.serving.network.llama.Llama`."""

    def logits(self, batch: PagedBatch) -> torch.Tensor: ...


class Captured(NamedTuple):
    """A captured pass: `replay` runs it again, over what its inputs are then, into `output`."""

    replay: Callable[[], None]
    output: torch.Tensor


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


class _Graph(NamedTuple):
    numbers: torch.Tensor
    captured: Captured


class DecodeGraphs:
    """The graphs of one network over one cache, by their buckets."""

    def __init__(self, network: Network, cache: PagedCache, capture: Capture | None = None) -> None:
        """capture: CUDA's, by default."""
        self._network, self._cache = network, cache
        self._capture = capture or _CudaCapture()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._fewest_blocks = -(-_FEWEST_TOKENS // cache.block_tokens)

    def logits(self, spans: Sequence[Span], tokens: Sequence[int]) -> torch.Tensor:
        """`Network.logits` of spans of one token each: float32 [rows, vocabulary], good until the next call.

        Raises what torch raises where a pass cannot be captured.
        """
        size = self._cache.block_tokens
        rows, needed = power_of_two(len(spans)), max(start // size + 1 for _, start, _ in spans)
        width = self._cache.row_blocks
        if self._cache.kernels == "gathered":
            width = power_of_two(max(self._fewest_blocks, needed))
        lines = [
            [token, start, *table[:needed], *[0] * (needed - len(table))]
            for (table, start, _), token in zip(spans, tokens, strict=True)
        ]
        numbers = torch.tensor(lines + lines[-1:] * (rows - len(lines)), dtype=torch.int64)
        device = self._cache.kv.device
        if device.type != "cpu":
            numbers = numbers.pin_memory()
        graph = self._graphs.get((rows, width))
        if graph is None:
            sent = torch.zeros(rows, 2 + width, dtype=torch.int64, device=device)
            sent[:, : 2 + needed] = numbers.to(device)
            captured = self._capture(lambda: self._network.logits(PagedBatch.of_rows(self._cache, sent)))
            graph = self._graphs[rows, width] = _Graph(sent, captured)
        graph.numbers[:, : 2 + needed].copy_(numbers, non_blocking=True)  # behind them nothing is read
        graph.captured.replay()
        return graph.captured.output[: len(spans)]


class _CudaCapture:
    """Captures on the current device; graphs share one pool of memory, since each one's output is used before the next
    is replayed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Captured:
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # what libraries allocate and choose at a first call is no part of the graph
            run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        return Captured(graph.replay, output)


def paging_works(kv: torch.Tensor, row_blocks: int, group: int, capture: Capture | None = None) -> bool:
    """Whether torch compiles `PagedRows` for this cache [layers, 2, blocks, kv_heads, block_tokens, head_dim], of which
    a row has at most `row_blocks` blocks; on a GPU it can be captured; and it is right. FlexAttention needs a compiler,
    and torch may change it. The reason is logged where it is not. Writes to the cache, and leaves zeros; raises
    nothing. `capture`: CUDA's on a GPU, and none elsewhere, by default.
    """
    blocks, (kv_heads, size, head_dim) = min(4, kv.shape[2], row_blocks), kv.shape[3:]
    if size < 16 or size & (size - 1) or head_dim < 16:
        log.info("attention gathers blocks: of %d tokens and heads of %d dims there is no kernel", size, head_dim)
        return False
    random = torch.Generator().manual_seed(0)
    keys, values = kv[0]
    query = torch.randn(2, kv_heads, group, head_dim, generator=random).to(kv.device, kv.dtype)
    tables = torch.tensor([[number, blocks - 1 - number] for number in range(blocks)], device=kv.device).t()
    visible = torch.tensor([3, blocks * size - 2], device=kv.device)
    scaling, near = head_dim**-0.5, 1e-4 if kv.dtype == torch.float32 else 0.05

    def paged() -> torch.Tensor:
        return PagedRows(tables, visible, row_blocks, kv_heads, size).attend(query, keys, values, scaling)

    try:
        if capture is None and kv.device.type == "cuda":
            capture = _CudaCapture()
        with torch.inference_mode():
            captured = capture(paged) if capture else None
            for side in (keys, values):  # only now: what was captured reads them when it is replayed
                side[:blocks] = torch.randn(blocks, kv_heads, size, head_dim, generator=random).to(kv.device)
            if captured:
                captured.replay()
            found = captured.output if captured else paged()
            expected = GatheredRows(tables, visible, blocks * size, size).attend(query, keys, values, scaling)
            right = torch.allclose(found.float(), expected.float(), rtol=near, atol=near)
        reason = "" if right else "is wrong"
    except Exception as error:  # a compiler that is missing, another torch's: anything
        reason = f"does not work: {str(error)[:300]}"
    finally:
        kv[0, :, :blocks].zero_()
    if reason:
        log.warning("attention gathers blocks: FlexAttention on %s %s", kv.device, reason)
    return not reason
