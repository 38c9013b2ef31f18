"""A cross-encoder in ONNX form: reads a query and a text together, as `[CLS] query [SEP] text [SEP]`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from runtime.errors import ModelError, RerankerFailed
from runtime.retrieval.embedding.embedder import truncate_text
from runtime.retrieval.embedding.model_directory import ModelDirectory
from runtime.retrieval.embedding.onnx_session import BATCH_TOKENS, OnnxSession, batches_by_length
from runtime.retrieval.reranking.reranker import Batch, Scored


class CrossEncoder:
    """A model directory whose network returns one logit for a pair; a score is its sigmoid, 0 to 1.

    A pair longer than the model's limit is truncated at the end of its longer side. Raises `ModelError`.
    """

    max_concurrency = 1

    def __init__(self, model: ModelDirectory) -> None:
        self.name = model.name
        self._whose = f"the reranker {model.name}"
        self._session = OnnxSession(self._whose, model.directory / model.model_file, model.directory / "tokenizer.json")
        self._tokenizer = self._session.tokenizer
        self._tokenizer.enable_truncation(model.encoding.max_tokens, strategy="longest_first")
        self._output = "logits" if "logits" in self._session.outputs else self._session.outputs[0]
        try:
            self.batches("a first query", ["a first text"])[0].score(0)
        except RerankerFailed as error:
            raise ModelError(error.message) from error

    def batches(self, query: str, texts: Sequence[str]) -> Sequence[Batch]:
        """See `Reranker.batches`: pairs of similar length share a forward pass."""
        # The query is tokenized once, not with every text.
        first = self._tokenizer.encode(truncate_text(query), add_special_tokens=False)
        seconds = self._tokenizer.encode_batch([truncate_text(text) for text in texts], add_special_tokens=False)
        pairs = [self._tokenizer.post_process(first, second) for second in seconds]
        rows = batches_by_length([len(pair.ids) for pair in pairs], BATCH_TOKENS)
        return [Batch(batch, partial(self._score, [pairs[row] for row in batch])) for batch in rows]

    def _score(self, pairs: Sequence[Any], until_ns: int) -> Scored:
        logits, mask = self._session.run(self._output, [pair.ids for pair in pairs], [pair.type_ids for pair in pairs])
        if logits.size != len(pairs):
            raise RerankerFailed(
                f"{self._whose}: the output {self._output} has shape {list(logits.shape)}, not one logit a pair"
            )
        if not np.isfinite(logits).all():
            raise RerankerFailed(f"{self._whose} returns values that are not finite")
        scores = 1.0 / (1.0 + np.exp(-logits.reshape(-1).astype(np.float64)))
        return Scored(scores.tolist(), int(mask.sum()))
