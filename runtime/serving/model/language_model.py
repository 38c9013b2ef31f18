"""Language model for batched serving: ragged chunks in, logits or tokens out, KV in one paged tensor.

torch is imported when a model is loaded, so that processes without a model do not import it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.errors import ConfigError, ContextLengthExceeded, InvalidRequest, ResourceBusy
from runtime.node.startup import run_in_background
from runtime.packages import require_packages
from runtime.serving.model.model_info import (
    Kernels,
    ModelInfo,
    WeightsType,
    kernels_on,
    kv_type,
    model_directory,
    model_identity,
    read_config,
)
from runtime.serving.model.sampler import Sampler
from runtime.serving.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from ipc.memory.device import CudaArray
    from runtime.cuda_graphs import Capture
    from runtime.serving.kv.transport import KvArray
    from runtime.serving.network.decode_graphs import DecodeGraphs
    from runtime.serving.network.llama import Llama
    from runtime.serving.network.prefill_graphs import PrefillGraphs


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, from position `start` on.

    Position p lies in `blocks[p // block_tokens]`. The KV of all positions before `start` must be written.
    """

    blocks: Sequence[int]
    start: int
    tokens: Sequence[int]


class SampledToken(NamedTuple):
    """A sequence's next token (None: no finite logit), and its logits on the host if they were requested."""

    token: int | None
    scores: torch.Tensor | None


class LanguageModel:
    """A model with its tokenizer and KV blocks. Not thread-safe.

    `kv` is a tensor [layers, 2, blocks, kv_heads, block_tokens, head_dim] on the model's device, of the data type
    `kv_type`; index 0 of the second axis is K (after RoPE), 1 is V. A position is valid once a chunk or a copy has
    written it; later positions are ignored. `kv_array` is the same memory for block copies. `identity` differs between
    models whose KV differs.
    """

    def __init__(
        self,
        network: Llama,
        tokenizer: Tokenizer,
        info: ModelInfo,
        kv: torch.Tensor,
        context_tokens: int,
        identity: bytes,
        kernels: Kernels,
    ) -> None:
        """Use `load`."""
        from runtime.serving.network.paged_cache import PagedCache

        self._network = network
        self._wanted = kernels
        uncompiled: Kernels = "gathered" if kernels == "paged" else kernels
        self._cache = PagedCache(kv, uncompiled, -(-context_tokens // int(kv.shape[4])))
        self._graphs: tuple[DecodeGraphs, PrefillGraphs] | None = None
        self.compiled = False
        self.tokenizer = tokenizer
        self.info = info
        self.kv = kv
        self.kv_array: KvArray = kv.numpy() if kernels == "cpu" else kv  # numpy has less overhead per copy
        self.blocks = int(kv.shape[2])
        self.block_tokens = int(kv.shape[4])
        self.context_tokens = context_tokens
        self.identity = identity

    @property
    def kernels(self) -> Kernels:
        """The kernels in use: "paged" ones after `compile`."""
        return self._cache.kernels

    @classmethod
    def load(
        cls,
        name_or_dir: str | Path,
        *,
        blocks: int,
        block_tokens: int,
        context_tokens: int,
        threads: int = 1,
        buffer: memoryview | CudaArray | None = None,
        device: str = "cpu",
        weights: WeightsType = "float32",
        prompts_only: bool = False,
        kernels: Kernels | None = None,
        layers: int | None = None,
        stamp: Callable[[str], None] = lambda part: None,
    ) -> LanguageModel:
        """Load a model on `device`: "cpu", with `threads` threads of this process, or "cuda:N".

        `weights` is the data type of the matrices and, except on CPUs, of KV; other computation is float32. A sequence
        has at most `context_tokens` tokens. With `buffer`, the KV tensor lies in that memory (at least
        `ModelInfo.kv_bytes`, writable, on that device) and keeps a reference to it. `kernels`: by default those of the
        device; "paged" ones are used after `compile`. With `prompts_only`, weights and kernels that only passes of few
        rows use are not kept. `layers`: at most so many of the model, for a process that only compiles. `stamp` is
        called with the name of each loading phase at its end.

        Raises `ModelError` for a missing package, file or model, `ConfigError` for invalid sizes or a device that torch
        does not have, and `ResourceBusy` if the device has too little memory.
        """
        info = ModelInfo.read(name_or_dir)
        info = replace(info, layers=min(layers or info.layers, info.layers))
        _check_sizes(info, blocks, block_tokens, context_tokens, threads)
        require_packages("torch", "safetensors")
        kernels = kernels or kernels_on(device)
        kind, directory = kv_type(weights, kernels), model_directory(name_or_dir)
        kv_bytes = info.kv_bytes(blocks, block_tokens, kind)
        host_kv = run_in_background(lambda: _host_kv(kv_bytes, buffer)) if device == "cpu" else None
        import torch

        from runtime.serving.network.llama import Llama, WeightFiles

        stamp("torch")
        stored: WeightsType = "bfloat16" if weights == "int8" and prompts_only else weights
        torch.set_num_threads(threads)
        check_device(device)
        tokenizer = run_in_background(lambda: Tokenizer.load(directory))
        try:
            network = Llama.load(read_config(directory), info, WeightFiles(directory), device, stored)
            memory = torch.from_numpy(host_kv()) if host_kv is not None else _device_kv(kv_bytes, buffer, device)
        except torch.OutOfMemoryError as error:
            raise ResourceBusy(f"{info.name!r} and {blocks} KV blocks do not fit on {device}: {error}") from error
        kv = memory.view(getattr(torch, kind)).view(info.kv_shape(blocks, block_tokens))
        stamp("weights")
        identity = model_identity(directory, block_tokens, weights, kind)
        if kernels == "paged" and prompts_only:
            kernels = "gathered"  # its few passes of single tokens are not worth seconds of compilation
        return cls(network, tokenizer(), info, kv, context_tokens, identity, kernels)

    def warm_up(self, *, rows: int = 0, tokens: int = 0) -> None:
        """Run a step of a row and a pass of a few prompt tokens, of at most `rows` and `tokens`, so that no request
        waits for first-call allocations. Overwrites KV blocks: call it before any request."""
        if rows:
            self.forward([Chunk([0], 0, [0])])
        if size := min(2, tokens, self.context_tokens, self.blocks * self.block_tokens):
            self.forward([Chunk(range(-(-size // self.block_tokens)), 0, [0] * size)])

    def compile(
        self, scratch: Sequence[int], *, rows: int, tokens: int, eager: bool = False, capture: Capture | None = None
    ) -> Iterator[None]:
        """Compile and capture steps of up to `rows` rows and passes of up to `tokens` prompt tokens on a GPU.

        Each step of the iterator is a piece of this, between which the model can be used; from the end on it replays
        what was captured. `compiled` is then whether torch has compiled the layers: if it cannot, or with `eager`, what
        is captured are the eager ones. The log says why it cannot. `scratch`: blocks of no sequence, whose contents are
        lost. `capture`: that of CUDA graphs by default.
        """
        import torch

        from runtime.serving.network.decode_graphs import DecodeGraphs, supports_paged_attention
        from runtime.serving.network.paged_cache import PagedCache
        from runtime.serving.network.prefill_graphs import PrefillGraphs, sizes_up_to

        network, first, row_blocks = self._network, scratch[0], self._cache.row_blocks
        group, kernels = self.info.heads // self.info.kv_heads, self._cache.kernels
        compiled = not eager and network.compile(self._cache, first)
        yield
        if compiled and self._wanted == "paged":
            kernels = "paged" if supports_paged_attention(self.kv, row_blocks, group, scratch, capture) else kernels
            yield
        cache = PagedCache(self.kv, kernels, row_blocks)
        graphs = DecodeGraphs(network, cache, capture), PrefillGraphs(network, cache, capture)
        for count in sorted({min(1 << bit, rows) for bit in range(rows.bit_length() + 1)} - {0}):
            with torch.inference_mode():  # not across a `yield`
                graphs[0].logits([([first], 0, 1)] * count, [0] * count)
            yield
        for size in sizes_up_to(min(tokens, self.context_tokens)):
            if size > 1:
                with torch.inference_mode():
                    graphs[1].logits([([first] * -(-size // self.block_tokens), 0, size)], [0] * size)
                yield
        self._cache, self._graphs, self.compiled = cache, graphs, compiled

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run chunks of different sequences in one pass; prompt chunks and single decode tokens may be mixed.

        Writes K and V of every token to its block, and returns the logits after each chunk's last token: float32
        [len(chunks), vocabulary], on the host. Only this copy synchronizes with a device: the pass is complete
        when this returns. Raises `ContextLengthExceeded` for a chunk beyond the context and `InvalidRequest` for a
        token outside the vocabulary, before anything is written.
        """
        import torch

        with torch.inference_mode():
            return self._logits(chunks).cpu()

    def step(
        self, chunks: Sequence[Chunk], samplers: Sequence[Sampler | None], scored: Sequence[bool]
    ) -> list[SampledToken | None]:
        """Run `forward` and sample a token for each chunk that has a sampler, on the device of the logits.

        Only the logits of chunks marked in `scored` are copied to the host. Raises as `forward`.
        """
        import torch

        from runtime.serving.network.sampling import sample

        sampling = [i for i, sampler in enumerate(samplers) if sampler is not None]
        with torch.inference_mode():
            logits = self._logits(chunks)
            if not sampling:
                logits[:1, :1].cpu()  # synchronizes with the device
                return [None] * len(chunks)
            rows_logits = logits if len(sampling) == len(chunks) else logits[sampling]
            specs = [sampler.next_spec() for sampler in samplers if sampler is not None]
            tokens = sample(rows_logits, specs).tolist()
            sampled: list[SampledToken | None] = [None] * len(chunks)
            for i, token in zip(sampling, tokens, strict=True):
                sampled[i] = SampledToken(token if token >= 0 else None, logits[i].cpu() if scored[i] else None)
        return sampled

    def _logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return the logits after each chunk's last token, on the device."""
        from runtime.serving.network.paged_cache import PagedBatch

        tokens = [token for chunk in chunks for token in chunk.tokens]
        self._check(chunks, tokens)
        spans = [(chunk.blocks, chunk.start, len(chunk.tokens)) for chunk in chunks]
        if self._graphs is not None:
            from runtime.serving.network.prefill_graphs import MAX_TOKENS

            steps, prompts = self._graphs
            if len(tokens) == len(chunks):
                return steps.logits(spans, tokens)
            if len(tokens) <= MAX_TOKENS:
                return prompts.logits(spans, tokens)
        return self._network.logits(PagedBatch(self._cache, spans, tokens))

    def _check(self, chunks: Sequence[Chunk], tokens: Sequence[int]) -> None:
        """Check chunks and all their tokens. Before each step, so with little work for a row."""
        if not chunks:
            raise ValueError("a batch needs at least one chunk")
        written: list[int] = []
        for chunk in chunks:
            blocks, start, count = chunk.blocks, chunk.start, len(chunk.tokens)
            if start < 0 or not count:
                raise ValueError(f"a chunk of {count} tokens at {start}: needs a token, from position 0 on")
            end = start + count
            if end > self.context_tokens:
                raise ContextLengthExceeded(f"{end} tokens in a context of {self.context_tokens}")
            needed = -(-end // self.block_tokens)
            if len(blocks) < needed:
                raise ValueError(f"{end} tokens need {needed} blocks of {self.block_tokens}, got {len(blocks)}")
            if min(blocks) < 0 or max(blocks) >= self.blocks:
                raise ValueError(f"blocks must be within 0..{self.blocks - 1}, got {sorted(blocks)}")
            written += blocks[start // self.block_tokens : needed]
        if len(set(written)) != len(written):
            twice = sorted({block for block in written if written.count(block) > 1})
            raise ValueError(f"a block is written twice in one batch: {twice}")
        if min(tokens) < 0 or max(tokens) >= self.info.vocabulary:
            raise InvalidRequest(
                f"token ids must be in 0..{self.info.vocabulary - 1}, got {min(tokens)}..{max(tokens)}"
            )


def _check_sizes(info: ModelInfo, blocks: int, block_tokens: int, context_tokens: int, threads: int) -> None:
    if blocks < 1 or block_tokens < 1:
        raise ConfigError(f"{blocks} KV blocks of {block_tokens} tokens: both must be at least 1")
    if threads < 1:
        raise ConfigError(f"threads is {threads}, must be at least 1")
    if not 1 <= context_tokens <= info.max_context_tokens:
        raise ConfigError(f"context_tokens is {context_tokens}; {info.name!r} allows 1..{info.max_context_tokens}")


def check_device(device: str) -> None:
    """Raise `ConfigError` for a device that torch does not have."""
    import torch

    if device == "cpu":
        return
    if not torch.cuda.is_available():
        cuda = (
            "is a build without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) finds no driver"
        )
        raise ConfigError(f"a model on {device!r}: this torch {torch.__version__} {cuda}")
    if device not in [f"cuda:{number}" for number in range(torch.cuda.device_count())]:
        available = ", ".join(f"cuda:{number}" for number in range(torch.cuda.device_count()))
        raise ConfigError(f"a model on {device!r}: torch finds {available}")


def _host_kv(size: int, buffer: memoryview | CudaArray | None) -> npt.NDArray[np.uint8]:
    """Return zeros in the buffer, or in new memory. Writing them faults the pages in before the first prompt."""
    if buffer is None:
        # page-aligned, unlike numpy's allocations
        buffer = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    elif not isinstance(buffer, memoryview) or buffer.readonly or buffer.nbytes < size:
        held = buffer.nbytes if isinstance(buffer, memoryview) else 0
        raise ConfigError(f"the KV buffer has {held} bytes; it must be writable and have {size}")
    kv = np.frombuffer(buffer, np.uint8, size)
    kv.fill(0)
    return kv


def _device_kv(size: int, buffer: memoryview | CudaArray | None, device: str) -> torch.Tensor:
    """Return zeros in the buffer, or in new memory, on a device."""
    import torch

    if buffer is None:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    memory = torch.as_tensor(buffer, device=device)  # no copy: the memory is on that device
    if memory.nbytes < size:
        raise ConfigError(f"the KV buffer has {memory.nbytes} bytes on {device}; it must have {size}")
    return memory[:size].zero_()
