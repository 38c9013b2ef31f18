"""Tests of an index's storage: saving, loading and rejection of damaged files."""

import errno
import gc
import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gpu import GraphIndex, IndexFormatError, InvalidParams
from gpu.index.rows import Dtype
from gpu.index.storage import MAX_SEEDS
from tests.gpu.datasets import DTYPES, clustered


@pytest.fixture(scope="module")
def index() -> GraphIndex:
    return GraphIndex.build(clustered(np.random.default_rng(1), 4200, 128), metric="l2", ids=np.arange(4200) * 3)


@pytest.fixture
def saved(index: GraphIndex, tmp_path: Path) -> Path:
    index.save(tmp_path / "index")
    return tmp_path / "index"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loaded_index_returns_the_results_of_the_built_one(tmp_path: Path, dtype: Dtype) -> None:
    random = np.random.default_rng(1)
    built = GraphIndex.build(clustered(random, 4200, 128), metric="ip", dtype=dtype, degree=16)
    built.save(tmp_path / "deep" / "index")
    loaded = GraphIndex.load(tmp_path / "deep" / "index")
    loaded.verify()
    facts = [(i.size, i.dim, i.degree, i.metric, i.dtype, i.nbytes) for i in (built, loaded)]
    assert facts[0] == facts[1]
    queries = clustered(random, 20, 128)
    (ids, distances), (others, their_distances) = built.search(queries), loaded.search(queries)
    assert np.array_equal(ids, others)
    assert np.array_equal(distances, their_distances)


def test_rows_are_memory_mapped(saved: Path) -> None:
    data = GraphIndex.load(saved).data
    assert isinstance(data.graph, np.memmap)
    assert isinstance(data.rows.codes, np.memmap)


def test_several_threads_can_load_indexes_at_once(saved: Path) -> None:
    """Garbage collections that release the GIL make CPython's parser, which numpy uses for headers, fail in threads."""

    def load(frames: int) -> None:
        if frames:
            load(frames - 1)
        else:
            for _ in range(20):
                GraphIndex.load(saved)

    threshold = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: time.sleep(0))
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(load, range(0, 40, 10)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.pop()


def test_saving_again_replaces_the_index_and_leaves_no_other_files(index: GraphIndex, saved: Path) -> None:
    index.save(saved)
    GraphIndex.load(saved).verify()
    assert [path.name for path in saved.parent.iterdir()] == ["index"]


def test_a_directory_without_an_index_is_not_replaced(index: GraphIndex, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(IndexFormatError, match="not an index; it will not be replaced"):
        index.save(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_an_index_that_was_never_saved_cannot_be_verified(index: GraphIndex) -> None:
    with pytest.raises(InvalidParams, match="no files to verify"):
        index.verify()


@pytest.mark.parametrize(("version", "codes"), [(2, False), (3, False), (3, True)])
def test_an_index_of_an_older_version_returns_the_same_results(tmp_path: Path, version: int, codes: bool) -> None:
    vectors = clustered(np.random.default_rng(1), 300, 48)
    built = GraphIndex.build(vectors, neighbor_codes=codes, code_bits=1)
    built.save(tmp_path / "index")
    path = tmp_path / "index" / "meta.json"
    meta = json.loads(path.read_text())
    assert meta.pop("code_bits") == int(codes)  # absent from both: codes had one bit
    path.write_text(json.dumps(meta | {"version": version}))
    old = GraphIndex.load(tmp_path / "index")
    old.verify()
    for found, expected in zip(old.search(vectors[:50]), built.search(vectors[:50]), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_index_with_sketches_of_an_older_version_is_read_without_them(tmp_path: Path) -> None:
    vectors = clustered(np.random.default_rng(1), 300, 48)
    built = GraphIndex.build(vectors, neighbor_codes=False)
    built.save(tmp_path / "index")
    meta = json.loads((tmp_path / "index" / "meta.json").read_text())
    for name in ("sketch.npy", "projection.npy"):
        (tmp_path / "index" / name).write_bytes(b"once used")
        meta["files"][name] = {"bytes": 9, "sha256": hashlib.sha256(b"once used").hexdigest()}
    change(tmp_path / "index", version=5, sketch_lines=1, slack=0.1, files=meta["files"])
    old = GraphIndex.load(tmp_path / "index")
    old.verify()
    np.testing.assert_array_equal(old.search(vectors[:50])[0], built.search(vectors[:50])[0])


def test_an_index_with_codes_of_more_bits_than_exist_says_to_build_it_anew(tmp_path: Path) -> None:
    GraphIndex.build(clustered(np.random.default_rng(1), 300, 48), neighbor_codes=True).save(tmp_path / "index")
    change(tmp_path / "index", code_bits=4)
    with pytest.raises(IndexFormatError, match="codes of 4 bits, which no longer exist: build it anew"):
        GraphIndex.load(tmp_path / "index")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_missing_truncated_or_altered_file_is_named(saved: Path) -> None:
    assert {"codes.npy", "graph.npy", "ids.npy", "neighbors.npy", "scan.npy"} <= set(names(saved))
    for name in names(saved):
        path = saved / name
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(IndexFormatError, match=name):
            GraphIndex.load(saved)
        path.write_bytes(content[:-10])
        with pytest.raises(IndexFormatError, match=name):
            GraphIndex.load(saved)
        if name != "meta.json":
            # Every byte of a header, some of the others', which are read alike, and the last of the contents.
            for byte in (*range(0, 128, 1 if name == "ids.npy" else 16), len(content) - 1):
                path.write_bytes(content[:byte] + bytes([content[byte] ^ 0x10]) + content[byte + 1 :])
                with pytest.raises(IndexFormatError, match=name):
                    GraphIndex.load(saved).verify()
        path.write_bytes(content)
    GraphIndex.load(saved).verify()


def change(directory: Path, **values: object) -> None:
    path = directory / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 99}, "version 99; this program reads versions 2 to 6"),
        ({"format": "other"}, "does not describe a trinity-index"),
        ({"size": 10**12}, "size is 1000000000000, outside 1..2147483647"),
        ({"dim": -1}, "dim is -1"),
        ({"degree": "32"}, "degree is '32'"),
        ({"size": 4199}, "was expected"),
        ({"metric": "hamming"}, "metric 'hamming'"),
        ({"dtype": "int8"}, "has int8 rows, which no longer exist: build it anew"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"files": {}}, "lists"),
        ({"files": []}, "list of files"),
    ],
)
def test_an_invalid_description_is_rejected(saved: Path, values: dict[str, object], message: str) -> None:
    change(saved, **values)
    with pytest.raises(IndexFormatError, match=message):
        GraphIndex.load(saved)


def reseal(directory: Path) -> None:
    """Rewrite the description with the files' current sizes."""
    files = json.loads((directory / "meta.json").read_text())["files"]
    for name, facts in files.items():
        facts["bytes"] = (directory / name).stat().st_size
    change(directory, files=files)


def test_anything_but_a_regular_file_with_an_array_is_rejected_without_blocking(saved: Path) -> None:
    with (saved / "ids.npy").open("wb") as archive:
        np.savez(archive, np.arange(4200))
    reseal(saved)
    with pytest.raises(IndexFormatError, match=r"ids.npy"):
        GraphIndex.load(saved)
    for name in ("ids.npy", "meta.json"):
        (saved / name).unlink()
        os.mkfifo(saved / name)
        with pytest.raises(IndexFormatError, match=name):
            GraphIndex.load(saved)


def test_contents_at_a_wrong_offset_are_rejected(saved: Path) -> None:
    content = (saved / "codes.npy").read_bytes()
    (saved / "codes.npy").write_bytes(content[:8] + b"\x77" + content[9:127] + b" \n" + content[128:])
    reseal(saved)
    with pytest.raises(IndexFormatError, match=r"codes.npy is damaged: .* boundary of 64 bytes"):
        GraphIndex.load(saved)


def test_an_array_that_may_not_be_read_is_told_from_a_damaged_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(np.lib.format, "open_memmap", denied)
    with pytest.raises(IndexFormatError, match=r"\.npy cannot be read: Permission denied$"):
        GraphIndex.load(saved)


def test_more_seeds_than_a_slot_holds_are_rejected(saved: Path) -> None:
    np.save(saved / "seeds.npy", np.arange(MAX_SEEDS + 1, dtype=np.uint32))
    reseal(saved)
    with pytest.raises(IndexFormatError, match=r"seeds.npy is damaged: 4097 seeds"):
        GraphIndex.load(saved)


def test_out_of_range_edges_are_found_by_verify_and_harmless_to_search(index: GraphIndex, saved: Path) -> None:
    graph = np.array(index.data.graph)
    graph[:, ::2] = 0xFFFFFFFF
    np.save(saved / "graph.npy", graph)
    loaded = GraphIndex.load(saved)
    ids, _ = loaded.search(clustered(np.random.default_rng(1), 50, 128))
    assert set(ids.ravel().tolist()) <= set((np.arange(4200) * 3).tolist())
    with pytest.raises(IndexFormatError, match=r"graph.npy"):
        loaded.verify()


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(IndexFormatError, match="is not an index"):
        GraphIndex.load(tmp_path / "nowhere")


def test_an_out_of_range_edge_is_found_without_reading_the_vectors(saved: Path) -> None:
    graph = np.load(saved / "graph.npy", mmap_mode="r+")
    graph[4100, 3] = (1 << 31) - 1
    graph.flush()
    altered = GraphIndex.load(saved)
    (saved / "codes.npy").unlink()
    with pytest.raises(IndexFormatError, match=r"graph\.npy is damaged: it points to row 2147483647 of 4200"):
        altered.check_graph()
