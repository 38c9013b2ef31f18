"""Text to vectors: what an embedder is. `loading.load_embedder` makes one.

embedder = load_embedder("all-minilm-l6-v2", threads=1)
vectors = embedder.embed(["How does a with statement call __exit__?"])  # float32 [1, 384], of length 1
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest

MAX_CHARACTERS = 32_768  # of one text; no embedder reads further, so a huge query costs no more than a long one

Vectors = NDArray[np.float32]
TextKind = Literal["query", "passage"]
"""Some models want a prefix before a text, and another one before what is looked for than before what is found."""


class Embedder(Protocol):
    """What turns texts into vectors. Safe to call from several threads."""

    @property
    def name(self) -> str:
        """Names what it makes of a text: two with one name give the same vectors."""
        ...

    @property
    def dim(self) -> int:
        """The length of every vector."""
        ...

    @property
    def max_tokens(self) -> int:
        """Of a longer text the end is not read."""
        ...

    @property
    def at_once(self) -> int:
        """How many calls of `embed` may go on at once with profit: 1 where it computes, more where it waits."""
        ...

    def count_tokens(self, text: str) -> int:
        """How many of `max_tokens` a text takes, about; the marks around it and its prefix not counted."""
        ...

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """Vectors float32 [len(texts), dim], each of Euclidean length 1, in the order of `texts`.

        (The length is another where a model's own files do not scale its vectors.) Raises `InvalidRequest` for a text
        that is not valid Unicode (an unpaired surrogate), `EmbedderUnreachable` and `EmbedderFailed` of a server.
        """
        ...


def embedding_text(title: str, text: str) -> str:
    """What is embedded of a document: its title, where it has one, and its text."""
    return f"{title}\n{text}" if title else text


def readable(text: str) -> str:
    """As much of a text as is read. Raises `InvalidRequest` for one that is not valid Unicode."""
    text = text[:MAX_CHARACTERS]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has an unpaired surrogate at character {error.start}") from error
    return text


def unit(vectors: Vectors) -> Vectors:
    """Scaled to length 1; a zero vector becomes one along the first axis, so that every text has a direction."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
    scaled[norms[:, 0] == 0, 0] = 1.0
    return scaled
