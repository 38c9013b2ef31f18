"""A collection stores its embedder: queries are embedded alike, or the missing embedder is reported."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from launchers.main import main
from runtime.checks.diagnosis import diagnose
from runtime.checks.memory_estimate import estimate
from runtime.checks.preflight import check_without_start
from runtime.errors import ConfigError, ModelError
from runtime.node.config_file import load_config
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.loading import choose_embedder
from tests.retrieval.embedding_server import embedding_server
from tests.retrieval.tiny_model import write_tiny_model

DOCUMENTS = [Document(str(n), "", text) for n, text in enumerate(["cat sleeps", "dog sleeps", "rates rise"])]


def plan_of(home: Path, *lines: str) -> NodePlan:
    (home / "node.toml").write_text("\n".join(["[[collections]]", 'name = "docs"', 'path = "docs"', *lines]))
    return lay_out(load_config(home / "node.toml"))


def diagnosed(home: Path) -> tuple[str, str]:
    """Return the doctor's finding about the collection's embedder."""
    (found,) = (one for one in diagnose(load_config(home / "node.toml")) if one.subject == "embedder of docs")
    return found.level, found.text


def test_passages_and_queries_are_embedded_with_their_prefixes(tmp_path: Path) -> None:
    directory = str(write_tiny_model(tmp_path / "m"))
    spec, model = choose_embedder(directory, query_prefix="query: ", passage_prefix="passage: ")
    _, bare = choose_embedder(directory)
    bulk_load.build(DOCUMENTS, tmp_path / "docs", embedder=spec, model=model, degree=2)
    with CollectionReader(tmp_path / "docs") as collection:
        assert collection.embedder == spec
        _, distances = collection.search(bare.embed([f"passage: {found.text}" for found in DOCUMENTS]), k=1)
    np.testing.assert_allclose(distances, 0, atol=1e-5)
    served = CollectionRegistry(plan_of(tmp_path)).embedder("docs")
    np.testing.assert_allclose(served.embed(["cat"]), bare.embed(["query: cat"]), atol=1e-6)


def test_a_missing_embedder_is_reported_at_start_and_can_be_configured(tmp_path: Path) -> None:
    spec, model = choose_embedder(str(write_tiny_model(tmp_path / "m")))
    bulk_load.build(DOCUMENTS, tmp_path / "docs", embedder=spec, model=model, degree=2)
    assert sum(need.host for need in estimate(plan_of(tmp_path)).values()) > sum(
        path.stat().st_size for path in (tmp_path / "m").rglob("*") if path.is_file()
    )
    (tmp_path / "m").rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"collection docs: the embedder m is not at .*/m: set `embedder` of the coll"):
        check_without_start(plan_of(tmp_path))
    moved = plan_of(tmp_path, 'embedder = "moved"')  # relative to the configuration's folder
    check_without_start(moved)
    assert CollectionRegistry(moved).embedder("docs").embed(["cat"]).shape == (1, 6)


def test_a_node_starts_without_its_embedding_server_but_not_without_a_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with embedding_server() as server:
        spec, model = choose_embedder(server.url, model="words", query_prefix="query: ", passage_prefix="passage: ")
        bulk_load.build(DOCUMENTS, tmp_path / "docs", embedder=spec, model=model, degree=2)
        assert sorted(server.texts[1:]) == [f"passage: {document.text}" for document in DOCUMENTS]
        CollectionRegistry.warm(plan_of(tmp_path))
        assert server.texts[-1] == "query: a first text"
        assert diagnosed(tmp_path) == ("ok", f"words at {server.url}")
        server.dim = 5
        assert diagnosed(tmp_path)[0] == "error"
    with pytest.raises(ConfigError, match=r"collection docs: the embedder's key cannot be read"):
        check_without_start(plan_of(tmp_path, 'embedder_key_file = "key"'))
    gone = plan_of(tmp_path, 'embedder = "http://127.0.0.1:9/v1"')
    check_without_start(gone)
    assert diagnosed(tmp_path)[0] == "warning"
    registry = CollectionRegistry.warm(gone)
    assert "http://127.0.0.1:9/v1 does not answer" in caplog.text
    assert registry.embedder("docs").dim == 4


def test_the_command_line_accepts_a_model_directory_and_shows_a_collections_embedder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f'{{"id": {n}, "text": "{document.text}"}}\n' for n, document in enumerate(DOCUMENTS)]
    (tmp_path / "d.jsonl").write_text("".join(lines))
    directory = write_tiny_model(tmp_path / "e5-small")
    build = ["index", "build", f"{tmp_path}/d.jsonl", "--out", f"{tmp_path}/docs", "--embedder", str(directory)]
    for arguments in ([*build, "--passage-prefix", "dog ", "--threads", "1"], ["index", "info", f"{tmp_path}/docs"]):
        monkeypatch.setattr("sys.argv", ["trinity", *arguments])
        with suppress(SystemExit):
            main()
    told = capsys.readouterr().out
    assert "e5-small@" in told
    assert f"of {directory}; prefixes 'query: ' of queries, 'dog ' of passages" in told
