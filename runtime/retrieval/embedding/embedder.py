"""Embedders: their descriptions, their interface, and feature hashing. `loading.load_embedder` creates one.

embedder = load_embedder("all-minilm-l6-v2", threads=1)
vectors = embedder.embed(["How does a with statement call __exit__?"])  # float32 [1, 384], of length 1
"""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from math import log
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from runtime.errors import InvalidRequest

# ---- the description of an embedder, stored with a collection so that queries are embedded as its documents were
# Built-in embedders are described by a name; a model directory or a server by a struct that includes its prefixes.


MAX_DIM = 16_384
SERVER_CONCURRENCY = 8  # concurrent requests to one server
_Text = Annotated[str, Meta(max_length=1024)]
_Place = Annotated[str, Meta(min_length=1, max_length=4096)]
_Dim = Annotated[int, Meta(ge=1, le=MAX_DIM)]


class _Described(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Display name: a directory's last part, or the server's model name."""
    dim: _Dim
    query_prefix: _Text = ""
    passage_prefix: _Text = ""


class DirectorySpec(_Described, frozen=True, tag="directory"):
    """A sentence-transformers model in ONNX form. `sha256` covers all files that are read: the directory may differ
    between machines, its content may not."""

    directory: _Place
    model_file: _Place
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class ServerSpec(_Described, frozen=True, tag="server"):
    """A server with OpenAI's `/v1/embeddings`. The key is not part of the description: it belongs to the node that
    serves the collection."""

    url: _Place
    """Including /v1."""


EmbedderSpec = str | DirectorySpec | ServerSpec


def embedder_name(spec: EmbedderSpec) -> str:
    """Return the embedder's name; two embedders with the same name produce the same vectors."""
    if isinstance(spec, str):
        return spec
    differs = msgspec.structs.replace(spec, directory="-") if isinstance(spec, DirectorySpec) else spec
    return f"{spec.name}@{hashlib.sha256(msgspec.json.encode(differs)).hexdigest()[:12]}"


MAX_CHARACTERS = 32_768  # of one text; the rest is ignored, which bounds the cost of a query

Vectors = NDArray[np.float32]
TextKind = Literal["query", "passage"]
"""Some models require a prefix, with different prefixes for queries and passages."""


class Turn(NamedTuple):
    """Texts and characters that a thread of the embedding stage takes at once."""

    texts: int
    characters: int


COMPUTED = Turn(32, 2048)
"""Two forward passes of an embedder that computes on the process's cores, whose threads it shares with others."""
SENT = Turn(64, 65_536)
"""A request of one that sends."""
ON_GPU = Turn(256, 32_768)
"""A forward pass on a GPU, of texts of 32 tokens; one of a few takes hardly less time."""


class Embedder(Protocol):
    """Interface of embedders. Thread-safe."""

    @property
    def name(self) -> str:
        """Two embedders with the same name produce the same vectors."""

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""

    @property
    def max_tokens(self) -> int:
        """Longer texts are truncated."""

    @property
    def max_concurrency(self) -> int:
        """Useful number of concurrent calls of `embed`: 1 if it computes in this process, more if it waits."""

    @property
    def turn(self) -> Turn:
        """What a thread of the embedding stage takes at once. Except for `COMPUTED`, its threads are its own:
        `max_concurrency` of them."""

    @property
    def tokenizing(self) -> "Tokenizing | None":
        """Both steps of `embed`, if it has tokens. May load the embedder."""

    def count_tokens(self, text: str) -> int:
        """Return the approximate number of tokens of a text, without special tokens and prefix."""

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """Return vectors float32 [len(texts), dim] in the order of `texts`, each normalized to Euclidean length 1.

        (Not normalized if the model's own files do not ask for it.) Raises `InvalidRequest` for a text that is not
        valid Unicode (an unpaired surrogate); a server's embedder raises `EmbedderUnreachable` and `EmbedderFailed`.
        """


class Tokenizing(Protocol):
    """An embedder's two steps, so that texts can be batched by their tokens. Thread-safe.

    `batch_tokens`: bound of a forward pass, padding included; `pass_tokens`: of its padding.
    """

    @property
    def batch_tokens(self) -> int: ...

    @property
    def pass_tokens(self) -> int: ...

    def tokenize(self, texts: Sequence[str], kind: TextKind = "query") -> list[list[int]]:
        """Return the token ids of each text, at least one. Raises `InvalidRequest` as `Embedder.embed`."""

    def count(self, text: str, tokens: Sequence[int], kind: TextKind) -> int:
        """Return what `Embedder.count_tokens` returns for a text of these tokens, without tokenizing it again unless
        they were truncated."""

    def embed_tokens(self, tokens: Sequence[list[int]]) -> Vectors:
        """Return what `Embedder.embed` returns for texts of these tokens."""


def embedding_text(title: str, text: str) -> str:
    """Return the text that is embedded for a document: its title, if it has one, and its text."""
    return f"{title}\n{text}" if title else text


def truncate_text(text: str) -> str:
    """Return the first `MAX_CHARACTERS` of a text. Raises `InvalidRequest` if they are not valid Unicode."""
    text = text[:MAX_CHARACTERS]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has an unpaired surrogate at character {error.start}") from error
    return text


def normalize(vectors: Vectors) -> Vectors:
    """Scale vectors to length 1. A zero vector becomes the first unit vector, so that every text has a direction."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
    scaled[norms[:, 0] == 0, 0] = 1.0
    return scaled


# ---- feature hashing of words and of their character 3- and 4-grams: no model, no training, any language


MIN_HASHING_DIM, MAX_HASHING_DIM = 16, 4096


class HashingEmbedder:
    """Embedder by feature hashing: each feature adds ±1 times its weight to one of `dim` components (Weinberger et al.
    2009, "Feature Hashing for Large Scale Multitask Learning"). Long words weigh more than short ones, a cheap proxy
    for rarity.
    """

    max_tokens = MAX_CHARACTERS
    max_concurrency = 1
    turn = COMPUTED
    tokenizing = None

    def __init__(self, dim: int) -> None:
        self.name = f"hashing-{dim}"
        self.dim = dim

    def count_tokens(self, text: str) -> int:
        """See `Embedder.count_tokens`: counts words."""
        return len(re.findall(r"\w+", text))

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        """See `Embedder.embed`."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for feature, weight in self._features(truncate_text(text)):
                code = zlib.crc32(feature.encode())
                vector[(code >> 1) % self.dim] += weight if code & 1 else -weight
        return normalize(vectors)  # an empty text, or features that cancel out, become the first unit vector

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
