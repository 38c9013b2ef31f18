"""From what somebody names to an embedder: a built-in name, a model's directory, a server's URL."""

import difflib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.errors import ConfigError, ModelError
from runtime.node.config import CollectionSection
from runtime.retrieval.embedding.embedder import (
    MAX_HASHING_DIM,
    MIN_HASHING_DIM,
    SERVER_AT_ONCE,
    DirectorySpec,
    Embedder,
    EmbedderSpec,
    HashingEmbedder,
    ServerSpec,
    TextKind,
    embedder_name,
)
from runtime.retrieval.embedding.model_directory import ModelDirectory, read_model_directory
from runtime.retrieval.embedding.onnx_model import MINILM, MINILM_DIM, OnnxEmbedder, load_minilm, minilm_files

DEFAULT_EMBEDDER = MINILM


@dataclass(frozen=True)
class EmbedderLocation:
    """Where an embedder is on this machine: `at` another directory or URL than the collection says ("": there), and the
    file with a server's key."""

    at: str = ""
    key_file: str = ""


DEFAULT_LOCATION = EmbedderLocation()


def embedder_location(collection: CollectionSection) -> EmbedderLocation:
    """Where the collection's embedder is on this machine."""
    return EmbedderLocation(collection.embedder, collection.embedder_key_file)


def load_embedder(
    spec: EmbedderSpec, *, threads: int = 1, place: EmbedderLocation = DEFAULT_LOCATION, for_a_build: bool = False
) -> Embedder:
    """The embedder of a collection, or of a name: "all-minilm-l6-v2" (384 dims), or "hashing-D", D from 16 to 4096.

    `threads` bounds the cores that one `embed` may use, or the requests to a server at once (hashing uses one). A
    server is waited for longer if it is `for_a_build`; it is not asked here. Raises `ModelError` for an unknown name,
    for a model whose package or files are missing (with the command that installs it), or are not those that the
    collection was built with; `ConfigError` for a key's file.
    """
    if threads < 1:
        raise ModelError(f"an embedder needs at least 1 thread, not {threads}")
    if isinstance(spec, str):
        dim = embedder_dim(spec)
        return load_minilm(threads=threads) if spec == MINILM else HashingEmbedder(dim)
    if isinstance(spec, ServerSpec):
        from runtime.retrieval.embedding.server import (  # and an HTTP client
            BUILD_RETRIES,
            REQUEST_RETRIES,
            ServerEmbedder,
        )

        patience = BUILD_RETRIES if for_a_build else REQUEST_RETRIES
        return ServerEmbedder(spec, key=read_key(place.key_file), threads=threads, url=place.at, patience=patience)
    found = _directory(spec, place)
    if found.sha256() != spec.sha256:
        raise ModelError(
            f"{found.directory} holds another model than the {spec.name} that the collection was built with: "
            "the checksum of its files differs"
        )
    embedder = _of_directory(found, spec, threads)
    if embedder.dim != spec.dim:
        raise ModelError(f"the embedder {spec.name} gives vectors of {embedder.dim} dimensions, not of {spec.dim}")
    return embedder


def embedder_dim(spec: EmbedderSpec) -> int:
    """The length of its vectors; it is not loaded. Raises `ModelError` for an unknown name."""
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


def check_embedder(spec: EmbedderSpec, place: EmbedderLocation = DEFAULT_LOCATION) -> None:
    """Raises what `load_embedder` would, as far as that can be seen without loading anything."""
    embedder_dim(spec)
    if isinstance(spec, str) and place != DEFAULT_LOCATION:
        raise ConfigError(f"the embedder {spec!r} is built in: it has no other place and no key")
    if spec == MINILM:
        minilm_files()
    elif isinstance(spec, ServerSpec):
        read_key(place.key_file)
    elif isinstance(spec, DirectorySpec):
        _directory(spec, place)


def model_bytes(spec: DirectorySpec, place: EmbedderLocation = DEFAULT_LOCATION) -> int:
    """Of the files that are loaded. Raises `ModelError`."""
    found = _directory(spec, place)
    return sum((found.directory / name).stat().st_size for name in found.files)


def choose_embedder(
    named: str,
    *,
    model: str = "",
    key_file: str = "",
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    threads: int = 1,
) -> tuple[EmbedderSpec, Embedder]:
    """The embedder for a new collection, loaded, and its description. A server is asked for one vector.

    named: a built-in name, a directory with a sentence-transformers model in ONNX form (or an .onnx file in it), or the
    URL of a server with its /v1, which calls the embedder `model`. Prefixes: None takes the model's own. Raises
    `ModelError`, `ConfigError`, `EmbedderUnreachable` and `EmbedderFailed`.
    """
    prefixes = {
        name: given
        for name, given in (("query_prefix", query_prefix), ("passage_prefix", passage_prefix))
        if given is not None
    }
    if long := [name for name, given in prefixes.items() if len(given) > 1024]:
        raise ConfigError(f"{long[0]} has {len(prefixes[long[0]])} characters, the limit is 1024")
    if re.match(r"https?://", named):
        return _choose_server(named, model, key_file, prefixes, threads)
    if model or key_file:
        raise ConfigError(f"{named!r} is no URL of a server: an embedder's model and key go with one")
    if "/" not in named and not named.endswith(".onnx") and not Path(named).is_dir():
        if prefixes:
            raise ConfigError(f"the embedder {named!r} takes no prefixes")
        return named, load_embedder(named, threads=threads)
    found = read_model_directory(Path(named))
    own = {"query_prefix": found.encoding.query_prefix, "passage_prefix": found.encoding.passage_prefix}
    spec = DirectorySpec(
        name=found.name, dim=1, directory=str(found.directory), model_file=found.model_file, sha256=found.sha256(),
        **(own | prefixes),
    )  # fmt: skip
    embedder = _of_directory(found, spec, threads)
    spec = msgspec.structs.replace(spec, dim=embedder.dim)
    embedder.name = embedder_name(spec)
    return spec, embedder


def _choose_server(
    url: str, model: str, key_file: str, prefixes: dict[str, str], threads: int
) -> tuple[EmbedderSpec, Embedder]:
    from runtime.retrieval.embedding.server import BUILD_RETRIES, ServerEmbedder

    parts = urlsplit(url)
    if not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no URL of a server as it is needed here: http(s)://HOST[:PORT]/v1")
    if not 1 <= len(model) <= 256:
        raise ConfigError("a server is asked for a model by its name: give the embedder's model")
    key = read_key(key_file)
    spec = ServerSpec(name=model, dim=1, url=url.rstrip("/"), **prefixes)
    probe = ServerEmbedder(msgspec.structs.replace(spec, dim=0), key=key)
    spec = msgspec.structs.replace(spec, dim=int(probe.embed(["a first text"], "passage").shape[1]))
    return spec, ServerEmbedder(spec, key=key, threads=threads, patience=BUILD_RETRIES)


def read_key(path: str, whose: str = "the embedder's") -> str:
    """The first line of a file; "" for no file. Raises `ConfigError`, which never shows the key."""
    if not path:
        return ""
    try:
        with Path(path).open(encoding="utf-8") as file:
            key = file.readline(8192).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{whose} key cannot be read from {path}: {error}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{path} has no key of printable ASCII on its first line")
    return key


def _directory(spec: DirectorySpec, place: EmbedderLocation) -> ModelDirectory:
    """The files where the collection, or this machine's configuration, says that they are."""
    named = Path(place.at or spec.directory)
    if named.suffix != ".onnx":
        if not named.is_dir():
            raise ModelError(
                f"the embedder {spec.name} is not at {named}: `embedder` of the collection says where it is"
            )
        named /= spec.model_file
    return read_model_directory(named)


def _of_directory(found: ModelDirectory, spec: DirectorySpec, threads: int) -> OnnxEmbedder:
    encoding = replace(found.encoding, query_prefix=spec.query_prefix, passage_prefix=spec.passage_prefix)
    tokenizer = found.directory / "tokenizer.json"
    return OnnxEmbedder(embedder_name(spec), found.directory / found.model_file, tokenizer, encoding, threads=threads)


# ---- an embedder that is loaded when it is first needed


class LazyEmbedder:
    """Loaded by the thread that embeds with it first: a loop does not wait for that."""

    def __init__(self, spec: EmbedderSpec, place: EmbedderLocation, threads: int) -> None:
        self.name, self.dim = embedder_name(spec), embedder_dim(spec)
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
