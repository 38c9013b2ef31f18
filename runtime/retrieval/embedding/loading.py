"""Loading of embedders: by built-in name, from a model directory, or from a server's URL."""

import difflib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.errors import ConfigError, ModelError
from runtime.node.api_keys import read_key
from runtime.node.config import CollectionSection
from runtime.retrieval.embedding.bert_files import BertFiles, check_packages
from runtime.retrieval.embedding.embedder import (
    COMPUTED,
    MAX_HASHING_DIM,
    MIN_HASHING_DIM,
    ON_GPU,
    SENT,
    SERVER_CONCURRENCY,
    DirectorySpec,
    Embedder,
    EmbedderSpec,
    HashingEmbedder,
    ServerSpec,
    TextKind,
    Tokenizing,
    embedder_name,
    normalize,
)
from runtime.retrieval.embedding.model_directory import ModelDirectory, read_model_directory
from runtime.retrieval.embedding.onnx_model import (
    MINILM,
    MINILM_DIM,
    MINILM_ENCODING,
    OnnxEncoder,
    minilm_files,
    minilm_weights,
)
from runtime.retrieval.embedding.text_embedder import Encoding, TextEmbedder

DEFAULT_EMBEDDER = MINILM
_CPU = "cpu"
_NEAR = 0.95
"""Least cosine between the vectors of a text by a model's two forms; MiniLM's, in int8 and float16, have .999."""
_COMPARED = ("How does a with statement call __exit__?", "The cat sat on the mat while interest rates rose.")


@dataclass(frozen=True)
class EmbedderLocation:
    """Where an embedder is found on this machine: `override` replaces the directory or URL stored in the collection
    ("": not replaced); `key_file` contains a server's key. `device`: torch's name of the GPU that runs a model, "cpu"
    without; feature hashing and servers do not use it."""

    override: str = ""
    key_file: str = ""
    device: str = _CPU


DEFAULT_LOCATION = EmbedderLocation()


def embedder_location(collection: CollectionSection, device: str = _CPU) -> EmbedderLocation:
    """Return where the collection's embedder is found on this machine, and which device runs it."""
    return EmbedderLocation(collection.embedder, collection.embedder_key_file, device)


def load_embedder(
    spec: EmbedderSpec, *, location: EmbedderLocation = DEFAULT_LOCATION, for_build: bool = False
) -> Embedder:
    """Load an embedder by its description or name: "all-minilm-l6-v2" (384 dims), or "hashing-D", D from 16 to 4096.

    `for_build` selects longer timeouts and more retries for a server; no request is sent here. Raises
    `ModelError` for an unknown name and for a model whose package or files are missing (with the command that installs
    it) or differ from those that the collection was built with; `ConfigError` for a key file.
    """
    if isinstance(spec, str):
        dim = embedder_dim(spec)
        if spec != MINILM:
            return HashingEmbedder(dim)
        return _on_device(MINILM, *minilm_files(), MINILM_ENCODING, minilm_weights, location.device)
    if isinstance(spec, ServerSpec):
        from runtime.retrieval.embedding.server import (  # and an HTTP client
            BUILD_RETRIES,
            REQUEST_RETRIES,
            ServerEmbedder,
        )

        retries = BUILD_RETRIES if for_build else REQUEST_RETRIES
        key = read_key(location.key_file, "the embedder's")
        return ServerEmbedder(spec, key=key, url=location.override, retries=retries)
    files = _directory(spec, location)
    if files.sha256() != spec.sha256:
        raise ModelError(
            f"{files.directory} contains another model than the {spec.name} that the collection was built with: "
            "the checksum of its files differs"
        )
    embedder = _of_directory(files, spec, location.device)
    if embedder.dim != spec.dim:
        raise ModelError(f"the embedder {spec.name} returns vectors of {embedder.dim} dimensions, not {spec.dim}")
    return embedder


def embedder_dim(spec: EmbedderSpec) -> int:
    """Return the dimension of an embedder's vectors without loading it. Raises `ModelError` for an unknown name."""
    if not isinstance(spec, str):
        return spec.dim
    if spec == MINILM:
        return MINILM_DIM
    match = re.fullmatch(r"hashing-(\d{1,9})", spec)
    if match is None:
        nearest = difflib.get_close_matches(spec, [MINILM, "hashing-256"], n=1, cutoff=0.0)[0]
        raise ModelError(f"unknown embedder {spec[:256]!r}; did you mean {nearest!r}?")
    if not MIN_HASHING_DIM <= int(match[1]) <= MAX_HASHING_DIM:
        raise ModelError(f"{spec}: the dimension must be from {MIN_HASHING_DIM} to {MAX_HASHING_DIM}")
    return int(match[1])


def check_embedder(spec: EmbedderSpec, location: EmbedderLocation = DEFAULT_LOCATION) -> None:
    """Raise the errors of `load_embedder` that can be found without loading anything."""
    embedder_dim(spec)
    if isinstance(spec, str) and (location.override or location.key_file):
        raise ConfigError(f"the embedder {spec!r} is built in: it has no other location and no key")
    if spec == MINILM:
        minilm_files()
    elif isinstance(spec, ServerSpec):
        read_key(location.key_file, "the embedder's")
    elif isinstance(spec, DirectorySpec):
        _directory(spec, location)
    if location.device != _CPU and (files := gpu_files(spec, location)) is not None:
        check_packages(files.whose)


def gpu_files(spec: EmbedderSpec, location: EmbedderLocation = DEFAULT_LOCATION) -> BertFiles | None:
    """Return the files that a GPU runs, None if none would: feature hashing, a server. Raises `ModelError` for a model
    without a form for GPUs."""
    if isinstance(spec, DirectorySpec):
        return BertFiles.read(_directory(spec, location).directory, f"the embedder {spec.name}")
    return BertFiles.read(minilm_weights(), f"the embedder {MINILM}") if spec == MINILM else None


def model_bytes(spec: DirectorySpec, location: EmbedderLocation = DEFAULT_LOCATION) -> int:
    """Return the size of the files that are loaded, in bytes. Raises `ModelError`."""
    return _directory(spec, location).size_bytes()


def choose_embedder(
    named: str,
    *,
    model: str = "",
    key_file: str = "",
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    device: str = _CPU,
) -> tuple[EmbedderSpec, Embedder]:
    """Load the embedder for a new collection; return its description and the embedder. A server embeds one text.

    named: a built-in name, a directory with a sentence-transformers model in ONNX form (or an .onnx file in it), or the
    URL of a server including /v1, whose name for the embedder is `model`. Prefixes: None selects the model's own.
    device: see `EmbedderLocation`.
    Raises `ModelError`, `ConfigError`, `EmbedderUnreachable` and `EmbedderFailed`.
    """
    prefixes = {
        name: given
        for name, given in (("query_prefix", query_prefix), ("passage_prefix", passage_prefix))
        if given is not None
    }
    if long := [name for name, given in prefixes.items() if len(given) > 1024]:
        raise ConfigError(f"{long[0]} has {len(prefixes[long[0]])} characters, the limit is 1024")
    if re.match(r"https?://", named):
        return _choose_server(named, model, key_file, prefixes)
    if model or key_file:
        raise ConfigError(f"{named!r} is not a server's URL: an embedder's model and key require one")
    if "/" not in named and not named.endswith(".onnx") and not Path(named).is_dir():
        if prefixes:
            raise ConfigError(f"the embedder {named!r} takes no prefixes")
        return named, load_embedder(named, location=EmbedderLocation(device=device))
    files = read_model_directory(Path(named))
    own = {"query_prefix": files.encoding.query_prefix, "passage_prefix": files.encoding.passage_prefix}
    spec = DirectorySpec(
        name=files.name, dim=1, directory=str(files.directory), model_file=files.model_file, sha256=files.sha256(),
        **(own | prefixes),
    )  # fmt: skip
    embedder = _of_directory(files, spec, device)
    spec = msgspec.structs.replace(spec, dim=embedder.dim)
    embedder.name = embedder_name(spec)
    return spec, embedder


def _choose_server(url: str, model: str, key_file: str, prefixes: dict[str, str]) -> tuple[EmbedderSpec, Embedder]:
    from runtime.retrieval.embedding.server import BUILD_RETRIES, ServerEmbedder

    parts = urlsplit(url)
    if not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not a valid server URL: the form is http(s)://HOST[:PORT]/v1")
    if not 1 <= len(model) <= 256:
        raise ConfigError("a server's URL requires the name of the embedder's model")
    key = read_key(key_file, "the embedder's")
    spec = ServerSpec(name=model, dim=1, url=url.rstrip("/"), **prefixes)
    probe = ServerEmbedder(msgspec.structs.replace(spec, dim=0), key=key)
    spec = msgspec.structs.replace(spec, dim=int(probe.embed(["a first text"], "passage").shape[1]))
    return spec, ServerEmbedder(spec, key=key, retries=BUILD_RETRIES)


def _directory(spec: DirectorySpec, location: EmbedderLocation) -> ModelDirectory:
    """Read the model directory named by the collection, or by this machine's configuration."""
    named = Path(location.override or spec.directory)
    if named.suffix != ".onnx":
        if not named.is_dir():
            raise ModelError(
                f"the embedder {spec.name} is not at {named}: set `embedder` of the collection to its directory"
            )
        named /= spec.model_file
    return read_model_directory(named)


def _of_directory(files: ModelDirectory, spec: DirectorySpec, device: str) -> TextEmbedder:
    encoding = replace(files.encoding, query_prefix=spec.query_prefix, passage_prefix=spec.passage_prefix)
    model, tokenizer = files.directory / files.model_file, files.directory / "tokenizer.json"
    return _on_device(embedder_name(spec), model, tokenizer, encoding, lambda: files.directory, device)


def _on_device(
    name: str, model: Path, tokenizer: Path, encoding: Encoding, weights: Callable[[], Path], device: str
) -> TextEmbedder:
    """Load a model in ONNX form, or the one beside it in `weights()` on a GPU.

    The collection's checksum covers the ONNX form only, so the two are compared. Raises `ModelError` if they differ.
    """
    on_cpu = TextEmbedder(name, OnnxEncoder(name, model, tokenizer, encoding.pooling), encoding)
    if device == _CPU:
        return on_cpu
    files = BertFiles.read(weights(), f"the embedder {name}")
    check_packages(files.whose)
    from runtime.retrieval.embedding.torch_encoder import TorchEncoder  # and torch

    encoder = TorchEncoder(files, tokenizer, encoding.pooling, encoding.max_tokens, device)
    return same_vectors(on_cpu, TextEmbedder(name, encoder, encoding))


def same_vectors(on_cpu: TextEmbedder, on_gpu: TextEmbedder) -> TextEmbedder:
    """Return `on_gpu` if both give about the same vectors. Raises `ModelError`."""
    if on_gpu.dim != on_cpu.dim:
        raise ModelError(
            f"the embedder {on_gpu.name} on a GPU returns vectors of {on_gpu.dim} dimensions, its ONNX form of "
            f"{on_cpu.dim}"
        )
    one, other = (normalize(embedder.embed(_COMPARED)) for embedder in (on_cpu, on_gpu))
    cosine = float((one * other).sum(axis=1).min())
    if cosine < _NEAR:
        raise ModelError(
            f"the embedder {on_gpu.name}: its weights for a GPU are of another model than its ONNX form: the cosine of "
            f"their vectors is {cosine:.3f}, the limit is {_NEAR}"
        )
    return on_gpu


# ---- an embedder that is loaded on first use


class LazyEmbedder:
    """Embedder that is loaded by the thread that first embeds with it, so that no event loop waits for loading."""

    def __init__(self, spec: EmbedderSpec, location: EmbedderLocation) -> None:
        self.name, self.dim = embedder_name(spec), embedder_dim(spec)
        sends, computes = isinstance(spec, ServerSpec), isinstance(spec, DirectorySpec) or spec == MINILM
        self.max_concurrency = SERVER_CONCURRENCY if sends else 1
        self.turn = SENT if sends else ON_GPU if computes and location.device != _CPU else COMPUTED
        self._spec, self._location = spec, location
        self._lock = threading.Lock()
        self._loaded: Embedder | None = None

    @property
    def max_tokens(self) -> int:
        return self._embedder().max_tokens

    @property
    def tokenizing(self) -> Tokenizing | None:
        return self._embedder().tokenizing

    def count_tokens(self, text: str) -> int:
        return self._embedder().count_tokens(text)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> npt.NDArray[np.float32]:
        return self._embedder().embed(texts, kind)

    def _embedder(self) -> Embedder:
        with self._lock:
            if self._loaded is None:
                self._loaded = load_embedder(self._spec, location=self._location)
            return self._loaded
