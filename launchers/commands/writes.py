"""`trinity index upsert | delete | flush | compact | query`: what is written to a collection, and found in it."""

import os
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from launchers.commands.embedding_device import EmbeddingDevice, load_for_documents
from launchers.progress import BuildProgress, counted
from runtime.errors import (
    BuildRefused,
    CollectionError,
    InvalidDocument,
    InvalidFilter,
    Overloaded,
    TrinityError,
    UsageError,
)
from runtime.node.logs.log import escape_control
from runtime.retrieval.attributes.filters import Filter, parse_filter
from runtime.retrieval.attributes.schema import NAME, AttributeType
from runtime.retrieval.collections.description import read_description
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.embedding.loading import load_embedder
from runtime.retrieval.ingestion.build_inputs import explain_decode_error

Directory = Annotated[Path, typer.Argument(readable=False, help="A collection's directory.")]
Filtered = Annotated[str, typer.Option("--filter", help='A filter: {"type": "eq", "key": "year", "value": 2024}.')]
_MAX_LINE = 64 << 20


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    text: str = ""
    title: str = ""
    attributes: dict[str, str | int | float | bool | list[str]] = {}
    vector: list[float] | None = None


_TYPES = {str(kind) if kind is not AttributeType.STRINGS else "strings": kind for kind in AttributeType}


def declared(attribute: str) -> tuple[str, AttributeType]:
    """Parse an attribute and its type, NAME=TYPE. Raises `BuildRefused`."""
    name, _, kind = attribute.partition("=")
    if not NAME.fullmatch(name) or kind not in _TYPES:
        raise BuildRefused(f"--attribute {attribute[:80]}: give NAME=TYPE; the types are {', '.join(_TYPES)}")
    return name, _TYPES[kind]


def upsert(
    directory: Directory,
    source: Annotated[
        Path, typer.Argument(readable=False, help='JSON lines of id, text, title, attributes, vector; or "-".')
    ],
    batch: Annotated[int, typer.Option(help="Documents stored in a batch.", min=1, max=4096)] = 256,
    threads: Annotated[int, typer.Option(help="Cores to use; 0: all that this process may use.", min=0)] = 0,
    device: EmbeddingDevice = "cpu",
) -> None:
    """Store documents, and replace those with the same ids. Stored batches stay stored if a later one is refused."""
    begin, stored = time.monotonic(), 0
    spec = read_description(directory).embedder
    embedder = None if spec is None else load_for_documents(spec, device)
    with CollectionWriter(directory, embedder=embedder, threads=threads or len(os.sched_getaffinity(0))) as writer:
        if writer.repaired:
            print(writer.repaired, file=sys.stderr)
        waiting: list[UpsertDocument] = []
        try:
            for document in _documents(source):
                waiting.append(document)
                if len(waiting) == batch:
                    stored += _stored(writer, waiting)
                    waiting = []
            stored += _stored(writer, waiting)
        except TrinityError as error:
            if stored:
                raise type(error)(f"{error.message}; stored before: {counted(stored, 'document')}") from error
            raise
        print(
            f"{counted(stored, 'document')} stored in {time.monotonic() - begin:.1f} s; "
            f"{writer.state.count:,} in the collection"
        )


def delete(
    directory: Directory,
    ids: Annotated[list[str] | None, typer.Argument(help="Of documents.")] = None,
    filter: Filtered = "",
) -> None:
    """Delete documents by id, or all that pass a filter."""
    if bool(ids) == bool(filter):
        raise UsageError("give ids, or --filter")
    with CollectionWriter(directory, background=False) as writer:
        deleted = writer.delete(ids) if ids else writer.delete_where(_filter(filter))
        print(f"{counted(deleted, 'document')} deleted; {writer.state.count:,} in the collection")


def flush(directory: Directory) -> None:
    """Seal the growing rows of the log into segments, which are searched by a graph."""
    with CollectionWriter(directory, background=False) as writer:
        writer.flush()
        print(f"{directory}: {counted(len(writer.state.segments), 'segment')}")


def compact(directory: Directory, threads: Annotated[int, typer.Option(help="Cores to use.", min=1)] = 1) -> None:
    """Rewrite the collection, or each shard, into one segment without deleted rows."""
    with (
        BuildProgress(sys.stderr) as progress,
        CollectionWriter(directory, background=False, threads=threads) as writer,
    ):
        writer.compact(progress)
        segments = counted(len(writer.state.segments), "segment")
        print(f"{directory}: {counted(writer.state.count, 'document')} in {segments}")


def query(
    directory: Directory,
    text: Annotated[str, typer.Argument(help="The query.")],
    k: Annotated[int, typer.Option(help="Documents to find.", min=1, max=1000)] = 5,
    filter: Filtered = "",
) -> None:
    """Print the documents nearest to a text."""
    spec = read_description(directory).embedder
    if spec is None:
        raise CollectionError(f"{directory} has no embedder, so it cannot be searched for a text")
    vector = load_embedder(spec).embed([text], "query")
    with CollectionReader(directory) as reader:
        rows, distances = reader.search(vector, k, max(64, k), filter=_filter(filter) if filter else None)
        documents = reader.documents(rows[0][rows[0] >= 0].tolist())
    for document, distance in zip(documents, distances[0], strict=False):
        if document is not None:
            words = " ".join(f"{document.title} {document.text}".split())
            print(f"{distance:.4f}  {escape_control(document.id)}  {escape_control(words[:100])}")


def _stored(writer: CollectionWriter, documents: list[UpsertDocument]) -> int:
    try:
        return writer.upsert(documents)
    except Overloaded:  # faster than background builds seal segments
        writer.flush()
        return writer.upsert(documents)


def _documents(source: Path) -> Iterator[UpsertDocument]:
    decoder = msgspec.json.Decoder(_Line)
    try:
        with sys.stdin.buffer if str(source) == "-" else source.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, _MAX_LINE), b""), 1):
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                if not line.strip():
                    continue
                try:
                    document = decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise InvalidDocument(f"{source}, line {number}: {explain_decode_error(line, error)}") from error
                yield UpsertDocument(document.id, document.text, document.title, document.attributes, document.vector)
    except OSError as error:
        raise CollectionError(f"{source} cannot be read: {error.strerror}") from error


def _filter(text: str) -> Filter:
    if len(text) > 1 << 20:
        raise InvalidFilter("the filter is longer than 1 MiB")
    try:
        return parse_filter(msgspec.json.decode(text))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidFilter(f"the filter is not JSON: {error}") from error
