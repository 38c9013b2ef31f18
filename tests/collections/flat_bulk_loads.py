"""Bulk loads in the layout of earlier versions."""

import shutil
from pathlib import Path

from msgspec import structs

from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.collections.description import (
    ATTRIBUTES,
    DESCRIPTION,
    DOCUMENTS,
    INDEX,
    KEYWORDS,
    MANIFEST,
    checksum_file,
    encode_with_checksum,
)
from runtime.retrieval.collections.documents import DocumentStore
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment import sources_of
from runtime.retrieval.keywords.index import KeywordFile


def flatten(directory: Path, *, keywords: bool = True) -> Path:
    """Give a bulk load that was not written to the layout of earlier versions: see `upgrade`."""
    with CollectionReader(directory) as reader:
        state, about, segments = reader.state, reader.description, reader.state.segments
        documents = [one for segment in segments if segment.store for one in segment.store.all()]
        documents.sort(key=lambda document: document.row)
        names = []
        for segment in segments:
            name = INDEX if len(segments) == 1 else f"{INDEX}-{segment.info.shard}"
            (directory / "segments" / str(segment.info.number) / INDEX).rename(directory / name)
            names.append(f"{name}/meta.json")
        if documents:
            DocumentStore.write(directory / DOCUMENTS, documents, sources=sources_of(segments))
            columns = Columns.from_documents((one.attributes for one in documents), state.schema)
            (directory / ATTRIBUTES).write_bytes(columns.encode())
            names += [DOCUMENTS, ATTRIBUTES]
        if documents and keywords:
            KeywordFile.create(directory / KEYWORDS, ((one.title, one.text) for one in documents))
            names.append(KEYWORDS)
        files = {name: checksum_file(directory / name) for name in names}
        flat = structs.replace(about, size=state.count, files=files, nonce=None)
    for folder in ("segments", "log", "tombstones"):
        shutil.rmtree(directory / folder)
    (directory / MANIFEST).unlink()
    (directory / DESCRIPTION).write_bytes(encode_with_checksum(flat))
    return directory
