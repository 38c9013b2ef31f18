"""Sources: errors name the line or row, and reads are bounded."""

import gzip
import io
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import CollectionError
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.ingestion.build_inputs import (
    MAX_LINE_BYTES,
    read_documents,
    read_ids,
    read_source,
    read_truth,
    read_vectors,
)

GOOD = b'{"id": "a", "text": "one", "title": "T", "split": 3}\n\n{"text": "two", "id": 7, "title": null}\n'
TWO = [Document("a", "T", "one"), Document("7", "", "two")]


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_documents_are_read_plain_and_compressed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(GOOD) if name.endswith(".gz") else GOOD)
    stages: list[tuple[str, float]] = []
    assert list(read_documents(path, lambda stage, done: stages.append((stage, done)))) == TWO
    assert stages[-1] == ("read", 1.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "a", "text": ', "line 2: .*truncated"),
        (b"id,text", "line 2: .*malformed"),
        (b'["a", "b"]', "line 2: Expected `object`, got `array`"),
        (b'{"id": "a"}', "line 2: .*missing required field `text`"),
        (b'{"id": "a", "text": 5}', r"line 2: Expected `str`, got `int` - at `\$.text`"),
        (b'{"id": 1.5, "text": "x"}', r"line 2: .* at `\$.id`"),
        (b'{"id": "", "text": "x"}', "line 2: an id has 1 to 512 characters, not 0"),
        (b'{"id": "' + b"i" * 513 + b'", "text": "x"}', "line 2: an id has 1 to 512 characters, not 513"),
        (b'{"id": "a", "text": " \\n"}', "line 2: document 'a' has an empty text"),
        (b'{"id": "a", "text": "\xff"}', "line 2: .*utf-8"),
        (rb'{"id": "a", "text": "x\ud800"}', "line 2: not valid UTF-8: an unpaired surrogate"),
        (rb'{"id": "a", "text": "\udc00 at the begin"}', "line 2: .*unpaired surrogate"),
        (rb'{"id": "\ud83d", "text": "\ud83d\ude00"}', "line 2: .*unpaired surrogate"),
        (b'{"id": "a", "text": "\xed\xa0\x80"}', "line 2: .*unpaired surrogate"),
        (b"[" * 100_000, "line 2: .*(recursion|nested|truncated|Expected)"),
        (b'{"id": "a", "text": "' + b"x" * MAX_LINE_BYTES + b'"}', "line 2: longer than 4,194,304 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_an_invalid_line_is_reported_by_number(tmp_path: Path, line: bytes, message: str, suffix: str) -> None:
    path = tmp_path / f"documents{suffix}"
    content = b'{"id": "ok", "text": "fine"}\n' + line + b"\n"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    with pytest.raises(CollectionError, match=rf"documents{suffix}, {message}") as raised:
        list(read_documents(path))
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_byte_order_mark_before_the_first_line_is_dropped(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"documents{suffix}"
    content = BOM_UTF8 + GOOD
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    assert list(read_documents(path)) == TWO


def test_a_file_that_is_missing_empty_or_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectionError, match=r"no\.jsonl: No such file"):
        list(read_documents(tmp_path / "no.jsonl"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(CollectionError, match=r"empty\.jsonl contains no documents"):
        list(read_documents(tmp_path / "empty.jsonl"))
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(CollectionError, match="Is a directory"):
        list(read_documents(tmp_path / "dir.jsonl"))


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-12], lambda b: b[:20] + b"\x00\xff" * 9 + b[38:], lambda b: b"no" + b]
)
def test_a_corrupt_gzip_stream_is_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(damage(gzip.compress(GOOD)))
    with pytest.raises(CollectionError, match="gzip stream is damaged"):
        list(read_documents(path))


def test_vectors_are_memory_mapped(tmp_path: Path) -> None:
    for dtype in (np.float32, np.float16, np.uint8):
        expected = np.arange(12).reshape(3, 4).astype(dtype)
        np.save(tmp_path / "v.npy", expected)
        found = read_vectors(tmp_path / "v.npy")
        assert isinstance(found, np.memmap)
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(5, np.float32), r"has float32 of shape \[5\]"),
        (np.zeros((5, 2), np.int64), "has int64"),
        (np.zeros((5, 2), np.int32), "has int32"),
        (np.zeros((5, 2), ">f4"), "has >f4"),
        (np.zeros((0, 4), np.float32), "contains no vectors"),
        (np.zeros((4, 0), np.float32), "0 dimensions"),
        (np.zeros((1, 16_385), np.uint8), "16385 dimensions, outside 1..16384"),
    ],
)
def test_arrays_that_are_not_vectors_are_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(CollectionError, match=rf"v\.npy:? .*{message}"):
        read_vectors(tmp_path / "v.npy")


def _huge_header() -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1 << 10)})
    return stream.getvalue()


def _saved(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def _archive() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(3))
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an array",
        b"\x80\x04pickled",
        b"\x93NUMPY\x01\x00\xff\xff{",
        _huge_header(),
        _saved(np.zeros((9, 9), np.float32))[:-1],
        _saved(np.array([{"a": 1}], object), allow_pickle=True),
        _archive(),
    ],
    ids=["empty", "text", "a pickle", "header cut", "header of petabytes", "data cut", "pickled objects", "archive"],
)
def test_files_that_are_not_npy_are_refused_without_allocating_their_claimed_size(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "v.npy").write_bytes(content)
    with pytest.raises(CollectionError, match=r"v\.npy (is not a readable|is an archive)") as raised:
        read_vectors(tmp_path / "v.npy")
    assert "\n" not in raised.value.message
    assert "allow_pickle" not in raised.value.message


def test_ids_are_unique_integers(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.array([5, 0, 9], np.uint16))
    np.testing.assert_array_equal(read_ids(path), np.array([5, 0, 9], np.int64), strict=True)
    for ids, message in [
        (np.array([1, 2, 3, 2]), "row 3: duplicate id 2"),
        (np.array([1, -2]), "ids range from"),
        (np.array([1, 1 << 63], np.uint64), "ids range from"),
        (np.array([1.0]), "has float64"),
        (np.zeros((2, 2), np.int64), "has int64 of shape"),
    ]:
        np.save(path, ids)
        with pytest.raises(CollectionError, match=message):
            read_ids(path)


def test_the_ground_truth_must_match_the_queries_and_k(tmp_path: Path) -> None:
    path = tmp_path / "truth.npy"
    np.save(path, np.zeros((4, 10), np.int32))
    assert read_truth(path, 4, 10).shape == (4, 10)
    for queries, k in [(5, 10), (4, 11)]:
        with pytest.raises(CollectionError, match=f"truth for {queries} queries and k {k}"):
            read_truth(path, queries, k)


def test_a_source_is_read_by_its_name(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.eye(3, dtype=np.float32))
    (tmp_path / "d.jsonl").write_bytes(GOOD)
    assert isinstance(read_source(tmp_path / "v.npy"), np.ndarray)
    assert list(read_source(tmp_path / "d.jsonl")) == TWO
    with pytest.raises(CollectionError, match=r"supported sources end in \.jsonl"):
        read_source(tmp_path / "d.csv")
