"""An ONNX model of texts with its tokenizer, for embedders and cross-encoders: loading, padded batches, one output."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ModelError
from runtime.files import check_regular
from runtime.retrieval.embedding.integer_products import has_integer_products, with_integer_products

BATCH_TOKENS = 256
"""Texts of similar length share a forward pass up to this many tokens; more gains nothing on a CPU."""
PASS_TOKENS = 8
"""Most of these may be padding: more costs what a forward pass less saves, measured (all-MiniLM-L6-v2; a pass costs as
much as 10 to 15 tokens more, and 6 to 16 here take the same time within 5%)."""
_SLOW_FUSIONS = ["SkipLayerNormFusion"]
"""The fused operator takes five times as long as the two that it replaces: without it a text takes 6% less."""
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_INTEGERS = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


class OnnxSession:
    """A model file and a tokenizer file. `whose`: "the embedder x", for errors. Raises `ModelError` for unusable files.

    `integers`: whether products by weights that are stored as int8 are computed in integers, if the processor can.
    `tokenizer` neither pads nor truncates. `outputs`: names of the graph's outputs.
    """

    def __init__(self, whose: str, model: Path, tokenizer: Path, *, integers: bool = False) -> None:
        import onnxruntime  # slow to import
        from tokenizers import Tokenizer

        # Its own threads would spin beside those that embed: with them, two threads embed a third less.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # One core per forward pass and concurrent passes scale better than one pass on several cores.
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            given: str | bytes = str(check_regular(model))
            if integers and has_integer_products():
                given = with_integer_products(model.read_bytes())
            self._session = onnxruntime.InferenceSession(
                given, options, providers=["CPUExecutionProvider"], disabled_optimizers=_SLOW_FUSIONS
            )
            self.tokenizer = Tokenizer.from_file(str(check_regular(tokenizer)))
        except Exception as error:  # both libraries have exception classes of their own
            raise ModelError(f"{whose} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._whose = whose
        self._inputs = self._known_inputs()
        self.outputs = [str(output.name) for output in self._session.get_outputs()]

    def run(
        self, output: str, batch: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return an output for token ids, padded, and their mask [rows, tokens]. types: of the tokens, by default 0."""
        ids = np.zeros((len(batch), max(map(len, batch))), np.int64)
        mask, kinds = np.zeros_like(ids), np.zeros_like(ids)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
            if types is not None:
                kinds[row, : len(tokens)] = types[row]
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        given = dict(zip(_INPUTS, (ids, mask, kinds, positions), strict=True))
        inputs = {name: np.ascontiguousarray(given[name], dtype) for name, dtype in self._inputs.items()}
        try:
            (values,) = self._session.run([output], inputs)
        except Exception as error:  # onnxruntime has exception classes of its own
            raise ModelError(f"{self._whose} failed: {str(error).partition(chr(10))[0]}") from error
        return np.asarray(values, np.float32), mask

    def _known_inputs(self) -> dict[str, Any]:
        dtypes = {}
        for given in self._session.get_inputs():
            if given.name not in _INPUTS or given.type not in _INTEGERS:
                raise ModelError(
                    f"{self._whose}: its model requires the input {given.name!r} ({given.type}); "
                    f"supported are {', '.join(_INPUTS)} as integers"
                )
            dtypes[given.name] = _INTEGERS[given.type]
        return dtypes


def batches_by_length(lengths: Sequence[int], limit: int, pass_tokens: int = PASS_TOKENS) -> list[list[int]]:
    """Return rows in batches by length, each of at most `limit` tokens with padding (a longer row is a batch), of which
    at most `pass_tokens` are padding."""
    batches: list[list[int]] = []
    tokens = 0  # of the last batch, without padding
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[row]
        padded = (len(batches[-1]) + 1) * length if batches else limit + 1
        if padded <= limit and padded - tokens - length <= pass_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            tokens = 0
        tokens += length
    return batches
