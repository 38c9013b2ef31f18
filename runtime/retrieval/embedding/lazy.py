"""An embedder that is loaded when it is first needed."""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.retrieval.embedding.embedder import Embedder, TextKind
from runtime.retrieval.embedding.loading import EmbedderPlace, embedder_dim, load_embedder
from runtime.retrieval.embedding.specs import SERVER_AT_ONCE, EmbedderSpec, ServerSpec, name_of


class LazyEmbedder:
    """Loaded by the thread that embeds with it first: a loop does not wait for that."""

    def __init__(self, spec: EmbedderSpec, place: EmbedderPlace, threads: int) -> None:
        self.name, self.dim = name_of(spec), embedder_dim(spec)
        self.at_once = SERVER_AT_ONCE if isinstance(spec, ServerSpec) else 1
        self._spec, self._place, self._threads = spec, place, threads
        self._lock = threading.Lock()
        self._loaded: Embedder | None = None

    @property
    def max_tokens(self) -> int:
        return self._embedder().max_tokens

    def count_tokens(self, text: str) -> int:
        return self._embedder().count_tokens(text)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> npt.NDArray[np.float32]:
        return self._embedder().embed(texts, kind)

    def _embedder(self) -> Embedder:
        with self._lock:
            if self._loaded is None:
                self._loaded = load_embedder(self._spec, threads=self._threads, place=self._place)
            return self._loaded
