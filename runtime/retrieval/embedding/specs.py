"""Which embedder a collection was built with, as its description has it: enough to embed queries alike.

A name stands for what is built in. What lies in a directory or behind a URL is described, with the prefixes that its
texts were given.
"""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

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


def name_of(spec: EmbedderSpec) -> str:
    """Two embedders with one name give the same vectors."""
    if isinstance(spec, str):
        return spec
    differs = msgspec.structs.replace(spec, directory="-") if isinstance(spec, DirectorySpec) else spec
    return f"{spec.name}@{hashlib.sha256(msgspec.json.encode(differs)).hexdigest()[:12]}"
