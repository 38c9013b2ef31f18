"""Text to vectors: what an embedder is. `loading.load_embedder` makes one.

embedder = load_embedder("all-minilm-l6-v2", threads=1)
vectors = embedder.embed(["How does a with statement call __exit__?"])  # float32 [1, 384], of length 1
"""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from math import log
from typing import Annotated, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from runtime.errors import InvalidRequest

# ---- which embedder a collection was built with, as its description has it: enough to embed queries alike
# A name stands for what is built in. What lies in a directory or behind a URL is described, with the prefixes that its
# texts were given.


MAX_DIM = 16_384
SERVER_AT_ONCE = 8  # requests to one server
_Text = Annotated[str, Meta(max_length=1024)]
_Place = Annotated[str, Meta(min_length=1, max_length=4096)]
_Dim = Annotated[int, Meta(ge=1, le=MAX_DIM)]


class _Described(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """For people: a directory's last part, or what a server calls its model."""
    dim: _Dim
    query_prefix: _Text = ""
    passage_prefix: _Text = ""


class DirectorySpec(_Described, frozen=True, tag="directory"):
    """A sentence-transformers model in ONNX form. `sha256` is of all files that are read of it: where it lies may be
    another place on another machine, but not what it holds."""

    directory: _Place
    model_file: _Place
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class ServerSpec(_Described, frozen=True, tag="server"):
    """A server with OpenAI's `/v1/embeddings`. Its key is never in here: who serves the collection has one of their
    own."""

    url: _Place
    """With its /v1."""


EmbedderSpec = str | DirectorySpec | ServerSpec


def embedder_name(spec: EmbedderSpec) -> str:
    """Two embedders with one name give the same vectors."""
    if isinstance(spec, str):
        return spec
    differs = msgspec.structs.replace(spec, directory="-") if isinstance(spec, DirectorySpec) else spec
    return f"{spec.name}@{hashlib.sha256(msgspec.json.encode(differs)).hexdigest()[:12]}"


MAX_CHARACTERS = 32_768  # of one text; no embedder reads further, so a huge query costs no more than a long one

Vectors = NDArray[np.float32]
TextKind = Literal["query", "passage"]
"""Some models want a prefix before a text, and another one before what is looked for than before what is found."""


class Embedder(Protocol):
    """What turns texts into vectors. Safe to call from several threads."""

    @property
    def name(self) -> str:
        """Names what it makes of a text: two with one name give the same vectors."""

    @property
    def dim(self) -> int:
        """The length of every vector."""

    @property
    def max_tokens(self) -> int:
        """Of a longer text the end is not read."""

    @property
    def at_once(self) -> int:
        """How many calls of `embed` may go on at once with profit: 1 where it computes, more where it waits."""

    def count_tokens(self, text: str) -> int:
        """How many of `max_tokens` a text takes, about; the marks around it and its prefix not counted."""

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """Vectors float32 [len(texts), dim], each of Euclidean length 1, in the order of `texts`.

        (The length is another where a model's own files do not scale its vectors.) Raises `InvalidRequest` for a text
        that is not valid Unicode (an unpaired surrogate), `EmbedderUnreachable` and `EmbedderFailed` of a server.
        """


def embedding_text(title: str, text: str) -> str:
    """What is embedded of a document: its title, where it has one, and its text."""
    return f"{title}\n{text}" if title else text


def truncate_text(text: str) -> str:
    """As much of a text as is read. Raises `InvalidRequest` for one that is not valid Unicode."""
    text = text[:MAX_CHARACTERS]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has an unpaired surrogate at character {error.start}") from error
    return text


def normalize(vectors: Vectors) -> Vectors:
    """Scaled to length 1; a zero vector becomes one along the first axis, so that every text has a direction."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
    scaled[norms[:, 0] == 0, 0] = 1.0
    return scaled


# ---- feature hashing of words and of the 3- and 4-grams of their characters; no model, no training, any language


MIN_HASHING_DIM, MAX_HASHING_DIM = 16, 4096


class HashingEmbedder:
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
            for feature, weight in self._features(truncate_text(text)):
                code = zlib.crc32(feature.encode())
                vector[(code >> 1) % self.dim] += weight if code & 1 else -weight
        return normalize(vectors)  # an empty text, or features that cancel out, have the first axis

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
