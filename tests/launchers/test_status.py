"""`trinity status` on a terminal of 80 columns, and the line of what is written."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from launchers.status import show_workers
from runtime.node.config import SloSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.run_dir import NodeInfo
from runtime.node.supervisor.admin import CollectionsStatus, NodeStatus, WorkerStatus
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.process import report_collections
from tests.frontend.test_documents import Embeds

NAMES = ("frontend-0", "prefill-0", "prefill-10", "decode-0", "pool-0")


def shown(width: int, *, device: str = "cpu", written: CollectionsStatus | None = None) -> list[str]:
    workers = tuple(
        WorkerStatus(name, "starting", 4_194_303, 1, 12, 0.1, 12_345 << 20, device, tuple(range(0, 64, 2)))
        for name in NAMES
    )
    info = NodeInfo("a-node", 4_194_302, "http://127.0.0.1:8080", "control", (), ())
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    show_workers(NodeStatus(info, False, workers, written=written), console)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("device", ["cpu", "cuda:0,1,2,3"])
def test_names_and_states_are_complete_and_lines_fit_the_terminal(device: str) -> None:
    lines = shown(80, device=device)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    for name in NAMES:
        assert [line.split()[:2] for line in lines].count([name, "starting"]) == 1


def test_the_status_of_live_collections_is_the_frontends(tmp_path: Path) -> None:
    create(tmp_path / "notes", 8, metric="l2", degree=8)
    writes = WriterService({"notes": tmp_path / "notes"}, Embeds().embed, lambda _: HashingEmbedder(8))
    table = WorkerTable.create("frontend", "frontend-0", SloSection())
    report_collections(table, asyncio.run(writes.states()))
    assert CollectionsStatus.read(table) is None
    asyncio.run(writes.upsert("notes", [UpsertDocument(str(n), "t") for n in range(12)]))
    asyncio.run(writes.flush("notes"))
    asyncio.run(writes.delete("notes", ["1", "2"]))  # too few for the segment to be rewritten
    asyncio.run(writes.upsert("notes", [UpsertDocument("new", "t")]))
    report_collections(table, asyncio.run(writes.states()))
    found = CollectionsStatus.read(table)
    assert found is not None
    assert found.log_bytes > 0
    assert found == CollectionsStatus(11, 1, 1, 2, found.log_bytes, 0)
    writes.close()
    table.close()


@pytest.mark.parametrize(("building", "told"), [(0, ""), (1, ", 1 building")])
def test_collections_that_are_written_to_are_below_the_table(building: int, told: str) -> None:
    lines = shown(200, written=CollectionsStatus(12_345, 3, 120, 45, 5 << 19, building))
    assert lines[-1] == (
        f"collections: 12,345 documents in 3 segments{told}; 120 growing rows in the log (2.5 MiB); 45 tombstones"
    )
