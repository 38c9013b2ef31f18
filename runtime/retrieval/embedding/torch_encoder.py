"""Encoder on a GPU: weights from safetensors, 16 bits, and captured CUDA graphs for batches of short texts.

A batch of short texts takes a GPU less time than launching its kernels takes the host: it is padded to one of a few
sizes, each of which is one launch. Other batches run as they are. All sizes are captured while the model is loaded,
before other threads of the process use the GPU.
"""

import contextlib
import itertools
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.cuda_graphs import Capture, Captured, CudaCapture
from runtime.errors import DeviceFailed, ModelError, ResourceBusy
from runtime.files import check_regular
from runtime.retrieval.embedding.bert import Bert
from runtime.retrieval.embedding.bert_files import BATCH_TOKENS, WEIGHTS, BertFiles
from runtime.retrieval.embedding.embedder import ON_GPU, Vectors
from runtime.retrieval.embedding.text_embedder import Pooling

CAPTURED_LENGTHS = (16, 32, 64)
CAPTURED_ROWS = tuple(1 << power for power in range(9))
_ALIGNED = 8  # tokens of a row of other batches are a multiple, which attention's kernels want
_PASS_TOKENS = 2048  # of padding, of which rows have some anyway, up to the captured lengths


class TorchEncoder:
    """An `Encoder` over `Bert`. `encode` may be called by any thread; calls take turns.

    files: checked settings. max_tokens: of a text. device: torch's name. Raises `ModelError` for unusable files,
    `ResourceBusy` if the GPU has too little memory, `DeviceFailed`.
    """

    batch_tokens, pass_tokens, turn = BATCH_TOKENS, _PASS_TOKENS, ON_GPU

    def __init__(
        self,
        files: BertFiles,
        tokenizer: Path,
        pooling: Pooling | None,
        max_tokens: int,
        device: str,
        dtype: torch.dtype = torch.float16,
        capture: Capture | None = None,
    ) -> None:
        """`capture`: CUDA graph capture by default on a GPU, and none elsewhere."""
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        if pooling is None:
            raise ModelError(f"{files.whose} cannot run on a GPU: its files name no pooling")
        self._files, self._device = files, torch.device(device)
        self._lock = threading.Lock()
        self._stream: Any = None
        self._graphs: dict[tuple[int, int], tuple[Tensor, Captured]] = {}
        with self._typed(f"load {WEIGHTS}"):
            try:
                self.tokenizer = Tokenizer.from_file(str(check_regular(tokenizer)))
                weights = load_file(check_regular(files.directory / WEIGHTS))
            except Exception as error:  # both libraries have exception classes of their own
                raise ModelError(f"{files.whose} cannot be loaded: {error}") from error
            if self._device.type == "cuda":
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._bert = Bert(files, weights, pooling, device, dtype)
        self.dim = files.hidden
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if max_tokens > self._bert.max_tokens:
            raise ModelError(f"{files.whose} reads {max_tokens} tokens, but has {self._bert.max_tokens} positions")
        if self.tokenizer.get_vocab_size() > self._bert.vocabulary:
            raise ModelError(
                f"{files.whose}: its tokenizer has {self.tokenizer.get_vocab_size()} tokens, its weights have "
                f"{self._bert.vocabulary}"
            )
        if capture is not None or self._stream is not None:
            with self._typed("capture its graphs"):
                self._capture(capture or CudaCapture(), max_tokens)

    def encode(self, batch: Sequence[Sequence[int]]) -> Vectors:
        """See `Encoder.encode`. Raises `ResourceBusy` for a batch for which the GPU has no memory, `DeviceFailed`."""
        longest = max(map(len, batch))
        with self._typed(f"embed {len(batch)} texts of up to {longest} tokens"):
            size = self._size(len(batch), longest)
            if size is None:
                sent = torch.from_numpy(_numbers(batch, len(batch), -(-longest // _ALIGNED) * _ALIGNED))
                return self._on_host(self._bert.encode(sent.to(self._device)))
            sent, captured = self._graphs[size]
            sent.copy_(torch.from_numpy(_numbers(batch, *size)))
            captured.replay()
            return self._on_host(captured.output[: len(batch)])

    def _size(self, rows: int, tokens: int) -> tuple[int, int] | None:
        """Return the captured size for a batch."""
        fitting = [size for size in self._graphs if size[0] >= rows and size[1] >= tokens]
        return min(fitting, key=lambda size: size[0] * size[1], default=None)

    def _capture(self, capture: Capture, most: int) -> None:
        """Capture the sizes whose texts have up to `most` tokens."""
        for rows, tokens in itertools.product(reversed(CAPTURED_ROWS), CAPTURED_LENGTHS):  # the largest first
            if rows * tokens <= BATCH_TOKENS and tokens <= most:
                sent = torch.ones(rows, 1 + tokens, dtype=torch.int32, device=self._device)
                self._graphs[rows, tokens] = sent, capture(partial(self._bert.encode, sent))

    def _on_host(self, vectors: Tensor) -> Vectors:
        on_host: Vectors = vectors.cpu().numpy()  # waits for this stream, not for the device
        return on_host

    @contextlib.contextmanager
    def _typed(self, what: str) -> Any:
        """One caller at a time, on this encoder's stream; torch's errors become the runtime's."""
        try:
            with self._lock, torch.inference_mode(), torch.cuda.stream(self._stream):
                yield
        except torch.OutOfMemoryError as error:
            raise ResourceBusy(
                f"{self._files.whose} cannot {what}: {self._device} has too little free memory; lower what else runs "
                "there, or set embedding.devices to another GPU"
            ) from error
        except torch.AcceleratorError as error:
            reason = str(error).partition("\n")[0]
            raise DeviceFailed(f"{self._files.whose} cannot {what}: {self._device} failed: {reason}") from error
        except RuntimeError as error:
            raise ModelError(f"{self._files.whose} cannot {what}: {str(error).partition(chr(10))[0]}") from error


def _numbers(batch: Sequence[Sequence[int]], rows: int, tokens: int) -> NDArray[np.int32]:
    """Return a batch as `Bert.encode` takes it; rows of padding have one token."""
    numbers = np.zeros((rows, 1 + tokens), np.int32)
    numbers[:, 0] = 1
    for row, ids in zip(numbers, batch, strict=False):
        row[0] = len(ids)
        row[1 : 1 + len(ids)] = ids
    return numbers
