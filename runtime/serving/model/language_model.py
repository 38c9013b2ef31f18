"""A Llama that serves many sequences at once: ragged chunks in, logits out, KV in one tensor of slots.

torch and transformers are imported when a model is loaded, not before: processes without a model never pay for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ConfigError, ContextLengthExceeded, InvalidRequest, ModelError
from runtime.serving.model.model_info import ModelInfo, model_directory
from runtime.serving.model.packages import require_packages
from runtime.serving.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Chunk:
    """Some tokens of one sequence, at positions `start`, `start + 1`, … of `slot`. All before them are in the slot."""

    slot: int
    start: int
    tokens: Sequence[int]


class LanguageModel:
    """One model with its tokenizer and its KV slots. Not for use by two threads at once.

    `kv` is a float32 tensor [layers, 2, slots, kv_heads, context_tokens, head_dim]; index 0 of the second axis is K
    (after RoPE), 1 is V. A position is valid once a chunk or `copy_kv` wrote it; what lies behind is never read.
    """

    def __init__(self, network: Any, tokenizer: Tokenizer, info: ModelInfo, kv: torch.Tensor) -> None:
        """Use `load`."""
        import torch

        from runtime.serving.model.slot_cache import SlotCache

        self._network = network
        self._cache = SlotCache(kv, one_core=torch.get_num_threads() == 1)
        self.tokenizer = tokenizer
        self.info = info
        self.kv = kv
        self.slots = int(kv.shape[2])
        self.context_tokens = int(kv.shape[4])

    @classmethod
    def load(
        cls,
        name_or_dir: str | Path,
        *,
        slots: int,
        context_tokens: int,
        threads: int = 1,
        buffer: memoryview | None = None,
    ) -> LanguageModel:
        """Load a model in float32 on the CPU, computing with `threads` threads (of this process as a whole).

        With `buffer`, the KV tensor lies in that memory (at least `kv_bytes` of it, writable), and keeps a reference
        to it. Raises `ModelError` for a missing package, file or model, `ConfigError` for impossible sizes.
        """
        info = ModelInfo.read(name_or_dir)
        _check_sizes(info, slots, context_tokens, threads)
        require_packages("torch", "transformers", "safetensors")
        import torch

        torch.set_num_threads(threads)
        kv = _kv_tensor(info.kv_shape(slots, context_tokens), buffer)
        directory = model_directory(name_or_dir)
        return cls(_load_network(directory), Tokenizer.load(directory), info, kv)

    @staticmethod
    def kv_bytes(name_or_dir: str | Path, slots: int, context_tokens: int) -> int:
        """Bytes of the KV tensor of such a model, from its config alone."""
        info = ModelInfo.read(name_or_dir)
        _check_sizes(info, slots, context_tokens, threads=1)
        return info.kv_bytes(slots, context_tokens)

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run chunks of different sequences together; prompts' chunks and single decode tokens may be mixed.

        Writes K and V of every token into its slot, and returns the logits after each chunk's last token: float32
        [len(chunks), vocabulary]. Raises `ContextLengthExceeded` for a chunk that leaves its slot and
        `InvalidRequest` for a token outside the vocabulary; nothing is written then.
        """
        import torch

        from runtime.serving.model.slot_cache import SlotBatch

        self._check(chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        with torch.inference_mode():
            batch = SlotBatch(self._cache, [(chunk.slot, chunk.start, len(chunk.tokens)) for chunk in chunks])
            output = self._network(
                input_ids=torch.tensor([tokens], device=self.kv.device),
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.last,
                slot_batch=batch,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def copy_kv(
        self,
        source: torch.Tensor | memoryview,
        from_slot: int,
        to_slot: int,
        tokens: int,
        *,
        source_context_tokens: int | None = None,
    ) -> None:
        """Copy the first `tokens` positions of a slot from another model's `kv`, or from the memory it lies in.

        A memoryview (which may be read-only) holds float32 laid out like `kv`, with as many slots as fit and
        `source_context_tokens` positions each (default: as many as here).
        """
        theirs = self._as_array(source, source_context_tokens or self.context_tokens)
        ours = self.kv.numpy()
        for name, slot, array in (("from_slot", from_slot, theirs), ("to_slot", to_slot, ours)):
            if not 0 <= slot < array.shape[2]:
                raise ValueError(f"{name} {slot} is not one of {array.shape[2]} slots")
        limit = min(theirs.shape[4], ours.shape[4])
        if not 0 <= tokens <= limit:
            raise ContextLengthExceeded(f"{tokens} tokens of KV to copy; both sides hold {limit}")
        ours[:, :, to_slot, :, :tokens] = theirs[:, :, from_slot, :, :tokens]

    def _as_array(self, source: torch.Tensor | memoryview, context_tokens: int) -> NDArray[np.float32]:
        if isinstance(source, memoryview):
            slot_bytes = self.info.kv_bytes(1, context_tokens)
            slots = source.nbytes // slot_bytes
            if slots == 0:
                raise ValueError(f"a buffer of {source.nbytes} bytes holds no slot of {slot_bytes}")
            shape = self.info.kv_shape(slots, context_tokens)
            return np.frombuffer(source, np.float32, count=int(np.prod(shape))).reshape(shape)
        expected = self.info.kv_shape(source.shape[2], source.shape[4])
        if tuple(source.shape) != expected:
            raise ValueError(f"a KV tensor of shape {tuple(source.shape)} is not of this model, which has {expected}")
        array: NDArray[np.float32] = source.numpy()
        return array

    def _check(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            raise ValueError("a batch needs at least one chunk")
        if len({chunk.slot for chunk in chunks}) != len(chunks):
            raise ValueError(f"two chunks of one batch share a slot: {sorted(chunk.slot for chunk in chunks)}")
        for chunk in chunks:
            if not 0 <= chunk.slot < self.slots:
                raise ValueError(f"slot {chunk.slot} is not one of {self.slots}")
            if chunk.start < 0 or not chunk.tokens:
                raise ValueError(f"a chunk of {len(chunk.tokens)} tokens at {chunk.start}: needs a token, from 0 on")
            if chunk.start + len(chunk.tokens) > self.context_tokens:
                raise ContextLengthExceeded(
                    f"{chunk.start + len(chunk.tokens)} tokens in a context of {self.context_tokens}"
                )
            if min(chunk.tokens) < 0 or max(chunk.tokens) >= self.info.vocabulary:
                raise InvalidRequest(
                    f"token ids must be in 0..{self.info.vocabulary - 1}, got {min(chunk.tokens)}..{max(chunk.tokens)}"
                )


def _check_sizes(info: ModelInfo, slots: int, context_tokens: int, threads: int) -> None:
    if slots < 1:
        raise ConfigError(f"slots is {slots}, must be at least 1")
    if threads < 1:
        raise ConfigError(f"threads is {threads}, must be at least 1")
    if not 1 <= context_tokens <= info.max_context_tokens:
        raise ConfigError(f"context_tokens is {context_tokens}; {info.name!r} allows 1..{info.max_context_tokens}")


def _kv_tensor(shape: tuple[int, ...], buffer: memoryview | None) -> torch.Tensor:
    import torch

    if buffer is None:
        return torch.zeros(shape, dtype=torch.float32)
    count = int(np.prod(shape))
    if buffer.readonly or buffer.nbytes < 4 * count:
        raise ConfigError(f"the KV buffer has {buffer.nbytes} bytes, must be writable and have {4 * count}")
    return torch.frombuffer(buffer, dtype=torch.float32, count=count).view(shape)


def _load_network(directory: Path) -> Any:
    """The transformers model, its attention replaced by that of the slot cache."""
    import torch
    from safetensors import SafetensorError
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    from runtime.serving.model.packed_linear import pack_linears
    from runtime.serving.model.slot_cache import ATTENTION

    logging.disable_progress_bar()  # a worker's log is no terminal
    try:
        network, report = LlamaForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the model in {directory}: {error}") from error
    if missing := sorted(report["missing_keys"]):  # transformers would go on with random numbers in their place
        raise ModelError(f"the weights in {directory} lack {len(missing)} tensors, such as {missing[0]}")
    network.eval().requires_grad_(False)
    pack_linears(network)
    return network
