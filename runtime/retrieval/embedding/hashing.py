"""Feature hashing of words and of the 3- and 4-grams of their characters; no model, no training, any language."""

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from math import log

import numpy as np

from runtime.retrieval.embedding.embedder import MAX_CHARACTERS, TextKind, Vectors, readable, unit

MIN_HASHING_DIM, MAX_HASHING_DIM = 16, 4096


class Hashing:
    """Each feature adds ±1 times its weight to one of `dim` places (Weinberger et al. 2009, "Feature Hashing for Large
    Scale Multitask Learning"). Long words weigh more than short ones, a cheap stand-in for their rarity.
    """

    max_tokens = MAX_CHARACTERS
    at_once = 1

    def __init__(self, dim: int) -> None:
        self.name = f"hashing-{dim}"
        self.dim = dim

    def count_tokens(self, text: str) -> int:
        """See `Embedder.count_tokens`: its words."""
        return len(re.findall(r"\w+", text))

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """See `Embedder.embed`."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for feature, weight in self._features(readable(text)):
                code = zlib.crc32(feature.encode())
                vector[(code >> 1) % self.dim] += weight if code & 1 else -weight
        return unit(vectors)  # an empty text, or features that cancel out, have the first axis

    def _features(self, text: str) -> list[tuple[str, float]]:
        words = Counter(re.findall(r"\w+", text.lower()))
        features = []
        for word, count in words.items():
            weight = min(len(word), 8) / 8 * (1.0 + log(count))
            marked = f"<{word}>"
            grams = [marked[i : i + n] for n in (3, 4) for i in range(len(marked) - n + 1)]
            features.append((word, weight))
            features.extend((gram, weight / len(grams)) for gram in grams)
        return features
