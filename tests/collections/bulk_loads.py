"""Bulk loads of documents, also in the layout of earlier versions."""

import shutil
from pathlib import Path

import numpy as np
from msgspec import structs

from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.collections import bulk_load
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
from runtime.retrieval.collections.documents import Document, DocumentStore
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment import sources_of
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.keywords.index import KeywordFile
from tests.collections.small_collections import vector_of

DIM = 16
ROWS = 20


def given(name: str, seed: int) -> UpsertDocument:
    return UpsertDocument(name, f"text {seed}", f"title {seed}", {"year": seed}, vector_of(seed, DIM))


def bulk(directory: Path, shards: int = 1, rows: int = ROWS) -> Path:
    documents = [Document(f"d{n}", f"title {n}", f"text {n}", {"year": 2000 + n}) for n in range(rows)]
    vectors = np.array([vector_of(n, DIM) for n in range(rows)])
    bulk_load.build(documents, directory, metric="l2", degree=4, vectors=vectors, shards=shards)
    return directory


def nearest(reader: CollectionReader, seed: int, k: int = 1, **options: object) -> list[str]:
    rows, _ = reader.search(vector_of(seed, DIM)[None], k, **options)  # type: ignore[arg-type]
    return [one.id for one in reader.documents(rows[0][rows[0] >= 0].tolist()) if one is not None]


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
