"""The option `--device` of the commands that embed documents."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

import typer

from runtime.errors import ModelError, ResourceBusy
from runtime.retrieval.embedding.embedder import Embedder, EmbedderSpec
from runtime.retrieval.embedding.loading import DEFAULT_LOCATION, EmbedderLocation, load_embedder

Device = Literal["cpu", "cuda"]
BuildDevice = Annotated[
    Device,
    typer.Option(
        help="Device that embeds texts and builds the graph; cuda: by torch, if the model has a form for it, and by "
        "cuVS, of the extra \\[cuvs]."
    ),
]
EmbeddingDevice = Annotated[
    Device, typer.Option(help="Device that embeds texts; cuda: by torch, if the model has a form for it.")
]
Loaded = TypeVar("Loaded")


def load_on(device: Device, load: Callable[[str], Loaded]) -> Loaded:
    """Return what `load` returns for torch's name of a device: on the GPU, or on the CPU with a line that says why."""
    if device == "cpu":
        return load("cpu")
    try:
        return load("cuda:0")
    except (ModelError, ResourceBusy) as error:
        loaded = load("cpu")
        print(f"texts are embedded on the CPU: {error.message}", file=sys.stderr)
        return loaded


def load_for_documents(spec: EmbedderSpec, device: Device, location: EmbedderLocation = DEFAULT_LOCATION) -> Embedder:
    """Load a collection's embedder. Raises as `load_embedder`, on a CPU."""
    return load_on(device, lambda at: load_embedder(spec, location=replace(location, device=at), for_build=True))
