"""Nodes of one version are replaced, one by one and under load, by nodes of another one on the same files."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.fleet.balancers import balancing, free_port
from runtime.retrieval.live.collection import create
from runtime.testing.node import Node
from tests.e2e.conftest import CONFIG
from tests.fleet.balancers import program
from tests.fleet.load import load, more, takes_part

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime", "gpu", "ipc", "launchers", "dashboards")
NOTES = """
[[collections]]
name = "notes"
path = "{notes}"
"""


@pytest.fixture
def other_version(tmp_path: Path) -> Path:
    """A copy of the product that says it has another version."""
    copy = tmp_path / "other"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package)
    (copy / "trinity_runtime-99.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: trinity-runtime\nVersion: 99.0\n"
    (copy / "trinity_runtime-99.0.dist-info" / "METADATA").write_text(metadata)
    return copy


@pytest.mark.timeout(600)
def test_nodes_are_upgraded_one_by_one_under_load_without_a_loss_and_have_what_was_written(
    model: Path, collection: Path, other_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("haproxy")
    configs = []
    for name in ("one", "two"):
        create(tmp_path / f"notes-{name}", 128, embedder="hashing-128")
        text = CONFIG.format(
            name=f"upgrade-{name}", run_dir=tmp_path / f"run-{name}", model=model, collection=collection, drain_s=20.0
        )
        configs.append(tmp_path / f"{name}.toml")
        text = text.replace("port = 0", f"port = {free_port()}").replace("drain_notice_s = 0", "drain_notice_s = 2.5")
        configs[-1].write_text(text + NOTES.format(notes=tmp_path / f"notes-{name}"))
    nodes: list[Node] = []
    try:
        nodes = [Node(config) for config in configs]
        before = _version(nodes[0])
        for node in nodes:
            assert _written(node, "by the one before")
        urls = [node.info.url for node in nodes]
        with balancing("haproxy", urls, tmp_path) as url, load(url, clients=2) as outcomes:
            more(outcomes, 10)
            monkeypatch.chdir(other_version)  # where a process that starts there finds the product
            monkeypatch.setenv("PYTHONPATH", str(other_version))
            for number, config in enumerate(configs):
                assert nodes[number].stop() == 0  # as `trinity stop` does: it drains
                nodes[number] = Node(config)
                takes_part(nodes[number])
                more(outcomes, 20)
        print(f"upgraded: {outcomes.sent} sent, {len(outcomes.lost)} lost")
        assert outcomes.lost == []
        assert len(outcomes.ended) == outcomes.sent
        for node in nodes:
            assert _version(node) == "99.0" != before
            query = {"query": "by the one before", "collection": "notes", "k": 1}
            assert node.post("/v1/retrieval", query)[1]["passages"][0]["id"] == "written"
            assert _written(node, "by the one after")
    finally:
        with ThreadPoolExecutor() as all_at_once:
            list(all_at_once.map(Node.stop, nodes))


def _version(node: Node) -> str:
    line = next(line for line in node.metrics_text().splitlines() if line.startswith("trinity_node_info{"))
    return line.partition('version="')[2].partition('"')[0]


def _written(node: Node, text: str) -> bool:
    body = {"documents": [{"id": "written", "text": text}]}
    with httpx.Client(base_url=node.info.url, trust_env=False, timeout=60) as http:
        return http.put("/v1/collections/notes/documents", json=body).status_code == 200
