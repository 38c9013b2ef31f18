"""The frontend's metrics of the collections that it writes to."""

import asyncio
from pathlib import Path

from runtime.node.config import SloSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import FrontendMetrics
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.process import report_collections
from tests.frontend.test_documents import Embeds

SHOWN = (
    FrontendMetrics.COLLECTION_DOCUMENTS, FrontendMetrics.COLLECTION_SEGMENTS, FrontendMetrics.COLLECTION_GROWING,
    FrontendMetrics.COLLECTION_TOMBSTONES, FrontendMetrics.COLLECTION_BUILDING,
)  # fmt: skip


def test_the_metrics_of_collections_are_what_was_written(tmp_path: Path) -> None:
    create(tmp_path / "notes", 8, metric="l2", degree=8)
    writes = WriterService({"notes": tmp_path / "notes"}, Embeds().embed, lambda _: HashingEmbedder(8))
    table = WorkerTable.create("frontend", "frontend-0", SloSection())
    report_collections(table, asyncio.run(writes.states()))
    assert table.value(FrontendMetrics.COLLECTION_LOG_BYTES) == 0
    asyncio.run(writes.upsert("notes", [UpsertDocument(str(n), "t") for n in range(12)]))
    asyncio.run(writes.flush("notes"))
    asyncio.run(writes.delete("notes", ["1", "2"]))  # too few for the segment to be rewritten
    asyncio.run(writes.upsert("notes", [UpsertDocument("new", "t")]))
    report_collections(table, asyncio.run(writes.states()))
    assert [table.value(metric) for metric in SHOWN] == [11, 1, 1, 2, 0]
    assert table.value(FrontendMetrics.COLLECTION_LOG_BYTES) > 0
    writes.close()
    table.close()
