"""CUDA graphs of passes with prompts: the programs between attentions are captured, attention is not.

A pass of a few hundred tokens takes a GPU less time than launching its kernels takes the host. Attention depends on the
chunks of a pass, so it runs as it is; the rest depends on the number of tokens only, which is padded to one of a few
sizes with copies of the last token. A size has one graph for each layer. All of them work in place on one state
(`decoder.State`), some KiB a token; their intermediate tensors share one pool.
"""

from collections.abc import Sequence

import torch

from runtime.cuda_graphs import Capture, Captured, CudaCapture
from runtime.serving.network.decoder import Layer, Programs, Rotation, State
from runtime.serving.network.llama import Llama
from runtime.serving.network.paged_cache import PagedBatch, PagedCache, Span

MAX_TOKENS = 1024  # beyond, kernels take longer than their launches, and padding would cost more than it saves
_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, MAX_TOKENS)


def sizes_up_to(tokens: int) -> list[int]:
    """Return the largest number of tokens, up to `tokens`, of each size that passes are padded to."""
    return [min(size, tokens) for size, smaller in zip(_SIZES, (0, *_SIZES), strict=False) if smaller < tokens]


class PrefillGraphs:
    """The graphs of one network over one cache, by size."""

    def __init__(self, network: Llama, cache: PagedCache, capture: Capture | None = None) -> None:
        """`capture`: CUDA graph capture by default."""
        self._network, self._cache = network, cache
        self._capture = capture or CudaCapture(warm_up=False)
        self._passes: dict[int, _CapturedPrograms] = {}

    def logits(self, spans: Sequence[Span], tokens: Sequence[int]) -> torch.Tensor:
        """Return `Llama.logits` of at most `MAX_TOKENS` tokens, not all single. A size's first pass also captures."""
        size = next(size for size in _SIZES if size >= len(tokens))
        batch = PagedBatch(self._cache, spans, tokens, size)
        captured = self._passes.get(size)
        if captured is not None:
            batch.output = captured.output
            return self._network.logits(batch, captured.programs)
        # Run as it is first: that loads kernels, which a capture must not do. Its memory for attention is kept.
        logits = self._network.logits(batch)
        captured = self._passes[size] = _CapturedPrograms(self._network.programs, batch, self._capture)
        self._network.logits(batch, captured.programs)
        return logits


class _CapturedPrograms:
    """Programs that are captured when they are first called, and replayed afterwards. A capture computes nothing."""

    def __init__(self, programs: Programs, batch: PagedBatch, capture: Capture) -> None:
        self.output, self._numbers = batch.output, batch.numbers.clone()
        self.programs = Programs(self._begin, self._proceed, programs.finish)
        self._programs, self._capture = programs, capture
        self._first: Captured | None = None
        self._layers: dict[int, Captured] = {}

    def _begin(
        self, table: torch.Tensor, rotation: Rotation, layer: Layer, stored: torch.Tensor, numbers: torch.Tensor
    ) -> State:
        if self._first is None:
            self._first = self._capture(lambda: self._programs.begin(table, rotation, layer, stored, self._numbers))
        else:
            self._numbers.copy_(numbers)
            self._first.replay()
        state: State = self._first.output
        return state

    def _proceed(
        self, layer: Layer, following: Layer, stored: torch.Tensor, state: State, attended: torch.Tensor
    ) -> None:
        captured = self._layers.get(id(layer))
        if captured is None:
            captured = self._capture(lambda: self._programs.proceed(layer, following, stored, state, attended))
            self._layers[id(layer)] = captured
        else:
            captured.replay()
