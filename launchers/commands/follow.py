"""`trinity index follow`: replicate a collection of another database into a collection."""

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from launchers.commands.embedding_device import EmbeddingDevice, load_for_documents
from launchers.progress import BuildProgress
from runtime.errors import CollectionError, ConfigError
from runtime.files import read_regular
from runtime.integrations.follow.document_mapper import FieldMapping
from runtime.integrations.follow.follower import BATCH, Follower, SyncResult
from runtime.integrations.follow.source import Source
from runtime.node.api_keys import read_key
from runtime.node.logs.log import escape_control
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.description import is_collection, read_description
from runtime.retrieval.collections.disk import Disk, storage_error
from runtime.retrieval.collections.writer import CollectionWriter

_FOLLOWED = "followed.json"
_NEEDS = {"qdrant": ("qdrant_client", "qdrant-client"), "milvus": ("pymilvus", "pymilvus")}


class _Followed(msgspec.Struct, forbid_unknown_fields=True):
    """Source of a collection, stored in its directory, so that it is never mixed with another source.

    embeds: vectors are computed from the texts, not copied.
    """

    database: str
    url: str
    collection: str
    embeds: bool

    def __str__(self) -> str:
        how = ", with vectors computed here" if self.embeds else ""
        return f"{self.collection!r} of {self.database} at {self.url}{how}"


def follow(
    database: Annotated[Literal["qdrant", "milvus"], typer.Argument(help="The database to follow.")],
    directory: Annotated[
        Path,
        typer.Argument(
            help="The collection: one of `trinity index build`, with the queries' embedder, empty or with --take-over. "
            "If it is missing, it is created without an embedder."
        ),
    ],
    url: Annotated[str, typer.Option(help="The database's address, or a path for its client's local mode.")],
    collection: Annotated[str, typer.Option(help="The name of the database's collection.")],
    filter: Annotated[
        str, typer.Option("--filter", help="Only follow points that pass this filter of the database.")
    ] = "",
    vector: Annotated[str, typer.Option(help="The name of the vector, if there are several.")] = "",
    text: Annotated[str, typer.Option(help="The field with the text; within an object: metadata.text.")] = "text",
    title: Annotated[str, typer.Option(help="The field with the title.")] = "title",
    attribute: Annotated[
        list[str] | None, typer.Option(help="A field that becomes an attribute. Default: all that can.")
    ] = None,
    version: Annotated[
        str, typer.Option(help="A field that changes whenever its point does: only changed points are read.")
    ] = "",
    key_file: Annotated[str, typer.Option(help="A file with the database's key, or token.")] = "",
    embed: Annotated[
        bool,
        typer.Option("--embed", help="Compute vectors from the texts by the collection's embedder."),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Begin with a collection that has documents; those not in the source go."),
    ] = False,
    every: Annotated[float, typer.Option(help="Seconds between two passes.", min=0.1)] = 30.0,
    once: Annotated[bool, typer.Option("--once", help="Run one pass.")] = False,
    batch: Annotated[int, typer.Option(help="Points read in a batch.", min=1, max=4096)] = BATCH,
    threads: Annotated[int, typer.Option(help="Threads that embed texts and build segments.", min=1)] = 1,
    device: EmbeddingDevice = "cpu",
) -> None:
    """Replicate a collection of Qdrant or Milvus into a collection until Ctrl-C: changed points are stored,
    removed ones are deleted. A node may serve the collection at the same time."""
    source = _source(database, url, collection, filter, vector, read_key(key_file, "the database's"))
    followed = _Followed(database, url, collection, embed)
    if not is_collection(directory):
        create(directory, source.dim, metric=source.metric)
    description = read_description(directory)
    if embed and description.embedder is None:
        raise ConfigError(f"{directory} has no embedder: create it by `trinity index build --embedder …` for --embed")
    if not embed and description.dim != source.dim:
        raise ConfigError(
            f"the vectors of {directory} have {description.dim} dimensions, those of {collection!r} {source.dim}: "
            "create it with the embedder of those vectors, or compute new ones with --embed"
        )
    model = load_for_documents(description.embedder, device) if embed else None  # type: ignore[arg-type]
    with (
        _stop_signals() as stop,
        CollectionWriter(directory, embedder=model, threads=threads) as writer,
        BuildProgress(sys.stderr) as progress,
    ):
        _check_followed(writer, followed, take_over)
        fields = FieldMapping(text, title, tuple(attribute or ()))
        follower = Follower(
            source, writer, fields, version=version, embeds=embed, batch=batch, report=_report, progress=progress,
            stopped=stop.is_set,
        )  # fmt: skip
        follower.follow(lambda: not once and not stop.wait(every), lambda result: _print(result, writer.state.count))


def _report(message: str) -> None:
    print(escape_control(message), file=sys.stderr, flush=True)


def _print(result: SyncResult, count: int) -> None:
    refused = f", {result.refused:,} refused" if result.refused else ""
    counts = f"{result.stored:,} stored, {result.deleted:,} deleted, {result.unchanged:,} unchanged{refused}"
    if result.changed or result.first:
        print(f"{counts}; {count:,} in the collection", flush=True)


def _source(database: str, url: str, collection: str, filter: str, vector: str, key: str) -> Source:
    module, package = _NEEDS[database]
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"missing: {package}. Install with: python -m pip install {package}")
    if database == "qdrant":
        from runtime.integrations.follow import qdrant

        return qdrant.Qdrant(qdrant.connect(url, key), collection, filter, vector)
    from runtime.integrations.follow import milvus

    return milvus.Milvus(milvus.connect(url, key), collection, filter, vector)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; a second signal ends the process at once."""
    stop = threading.Event()

    def handle(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_followed(writer: CollectionWriter, followed: _Followed, take_over: bool) -> None:
    """Record the source of a collection. Raises `ConfigError` if it has another source, or documents of none."""
    path = writer.directory / _FOLLOWED
    try:
        before = msgspec.json.decode(read_regular(path, 1 << 16), type=_Followed)
    except FileNotFoundError:
        if writer.state.count and not take_over:
            raise ConfigError(
                f"{writer.directory} has {writer.state.count:,} documents that are not from a source, and following "
                "deletes those that the source does not have: give an empty collection, or --take-over"
            ) from None
        before = followed
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    except msgspec.MsgspecError as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if before != followed:
        raise ConfigError(f"{writer.directory} follows {before}, not {followed}: give an empty collection")
    try:
        Disk().write_file(path, msgspec.json.encode(followed) + b"\n")
    except OSError as error:
        raise storage_error(error, f"{path} cannot be written") from error
