"""Passes of single tokens as captured CUDA graphs: a decode step is one launch instead of some dozens a layer.

A graph is of a number of rows, rounded up to a bucket; what is missing of the rows is the last one again, which writes
what that one writes. Where attention gathers blocks a graph is of a number of blocks that a row may see, too; reading
them in place takes the time of those that there are. A graph is captured when its bucket is first wanted, and then
replayed: all its inputs are one tensor of integers, which is sent anew for each step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from runtime.serving.network.paged_cache import PagedBatch, PagedCache, Span
from runtime.serving.network.row_attention import power_of_two

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
