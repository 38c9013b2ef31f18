"""Strategies that damage the files of collections, by accident or by an attacker."""

import hashlib
import json
import os
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from runtime.retrieval.collections import bulk_load, description
from runtime.retrieval.collections.documents import Document

Damage = Callable[[Path], None]
SIZE = 60


def build_all(home: Path) -> list[Path]:
    """Build one collection of each type: with documents; of vectors with custom ids; float16 in two shards."""
    documents = [Document(f"id-{n}", f"title {n}", f"the text of number {n * 7919} is {n}") for n in range(SIZE)]
    vectors = np.random.default_rng(1).normal(size=(SIZE, 48)).astype(np.float32)
    bulk_load.build(documents, home / "docs", embedder="hashing-256", degree=8)
    bulk_load.build(vectors, home / "bare", metric="l2", degree=8, ids=np.arange(SIZE) * 3)
    bulk_load.build(documents, home / "split", vectors=vectors, metric="ip", dtype="float16", degree=4, shards=2)
    return [home / name for name in ("docs", "bare", "split")]


def files_of(collection: Path) -> list[str]:
    return sorted(str(path.relative_to(collection)) for path in collection.rglob("*") if path.is_file())


# ---- hostile values

NUMBERS = st.sampled_from([0, 1, -1, 2, 59, 61, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**30, 1e308, -0.5])
SCALARS = (
    NUMBERS
    | st.integers()
    | st.none()
    | st.booleans()
    | st.text(max_size=8)
    | st.sampled_from(["x" * 5000, "../../x", "/dev/zero", "\0", "cosine", "l2", "ip", "int8", "hashing-4096"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 0x7F800000, 0x7FC00000, SIZE, SIZE - 1]) | st.integers(
    -(2**31), 2**31 - 1
)
DESCRS = st.sampled_from(
    ["<f4", "<f8", ">f4", "<u4", "<i8", "|i1", "|u1", "<f2", "|O", "<U9", "|V99", "<f4,<f4", "", "x" * 30, "|S0"]
)


@st.composite
def _bytes_damage(draw: st.DrawFn) -> Callable[[Path], None]:
    """Damage a file's bytes: a bit, some words, its end, all of it."""
    where = draw(st.integers(0, 400) | st.integers(0, 200_000))
    what = draw(st.sampled_from(["bit", "words", "cut", "more", "insert", "empty", "gone", "random"]))
    bit, words = draw(st.integers(0, 7)), draw(st.lists(WORDS, min_size=1, max_size=4))
    junk = draw(st.binary(min_size=1, max_size=64))

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        at = where % max(len(content), 1)
        match what:
            case "bit" if content:
                content[at] ^= 1 << bit
            case "words":
                packed = struct.pack(f"<{len(words)}i", *words)
                begin = at & ~3
                content[begin : begin + len(packed)] = packed
            case "cut":
                del content[at:]
            case "more":
                content += junk
            case "insert":
                content[at:at] = junk
            case "empty":
                content.clear()
            case "random":
                content[:] = junk
        path.unlink()
        if what != "gone":
            path.write_bytes(content)

    return change


@st.composite
def _kind_damage(draw: st.DrawFn) -> Callable[[Path], None]:
    """Replace a file by something else."""
    what = draw(st.sampled_from(["fifo", "directory", "loop", "nowhere", "zip", "other"]))

    def change(path: Path) -> None:
        content = path.read_bytes()
        path.unlink()
        match what:
            case "fifo":
                os.mkfifo(path)
            case "directory":
                path.mkdir()
            case "loop":
                path.symlink_to(path.name)
            case "nowhere":
                path.symlink_to("/nowhere/at/all")
            case "zip":
                with path.open("wb") as file:
                    np.savez(file, np.zeros(3))
            case _:
                others = sorted(p for p in path.parent.iterdir() if p.suffix == path.suffix and p.is_file())
                path.write_bytes(others[0].read_bytes() if others else content)

    return change


@st.composite
def _array_damage(draw: st.DrawFn) -> Callable[[Path], None]:
    """Make an array's header contradict its contents, or write invalid contents."""
    wrong = draw(st.sampled_from(["descr", "shape", "fortran", "version", "offset", "", "", ""]))
    descr = draw(DESCRS) if wrong == "descr" else None
    shape = tuple(draw(st.lists(NUMBERS, max_size=3))) if wrong == "shape" else None
    fortran = draw(st.sampled_from([True, 1, "x"])) if wrong == "fortran" else False
    version = draw(st.sampled_from([(2, 0), (3, 0), (9, 9)])) if wrong == "version" else (1, 0)
    odd = draw(st.integers(1, 63)) if wrong == "offset" else 0
    fill = draw(WORDS if wrong == "" else st.none() | WORDS)

    def change(path: Path) -> None:
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception:  # already damaged
            return
        content = array.tobytes()
        if fill is not None:
            content = (struct.pack("<i", fill) * (len(content) // 4 + 1))[: len(content)]
        header = repr(
            {
                "descr": array.dtype.str if descr is None else descr,
                "fortran_order": fortran,
                "shape": array.shape if shape is None else shape,
            }
        ).encode()
        header += b" " * (-(len(header) + 11) % 64 + odd) + b"\n"
        length = struct.pack("<H" if version[0] == 1 else "<I", len(header))
        path.write_bytes(b"\x93NUMPY" + bytes(version) + length + header + content)

    return change


STATEMENTS = st.sampled_from(
    [
        "UPDATE documents SET text = NULL",
        "UPDATE documents SET text = x'ff00ff'",
        "UPDATE documents SET text = CAST(x'ff00ff' AS TEXT)",
        "UPDATE documents SET title = 7",
        "UPDATE documents SET id = x'00' || row",
        "UPDATE documents SET text = zeroblob(400000000) WHERE row = 3",
        "UPDATE documents SET row = 9223372036854775807 WHERE row = 59",
        "UPDATE documents SET row = -row",
        "DELETE FROM documents WHERE row % 3 = 0",
        "DELETE FROM documents",
        "DROP TABLE documents",
        "ALTER TABLE documents RENAME COLUMN text TO body",
        "ALTER TABLE documents DROP COLUMN title",
        "ALTER TABLE documents RENAME TO others",
        "CREATE VIEW documents AS WITH RECURSIVE n(row) AS (SELECT 0 UNION ALL SELECT row + 1 FROM n) "
        "SELECT row, 'a' AS id, 'b' AS title, 'c' AS text FROM n",
        "CREATE VIEW documents AS SELECT 'many' AS row, 1 AS id, 2 AS title, 3 AS text",
        "CREATE TABLE documents (row TEXT, id, title, text)",
        "INSERT INTO documents VALUES ('many', 'a', 'b', 'c')",
        "PRAGMA user_version = 2",
        "PRAGMA application_id = 1",
        "PRAGMA journal_mode = WAL",
        "PRAGMA encoding = 'UTF-16'",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = 'CREATE TABLE documents (row, id, title, text)'",
        "UPDATE sqlite_master SET rootpage = 10000",
    ]
)


@st.composite
def _documents_damage(draw: st.DrawFn) -> Callable[[Path], None]:
    """Write to the database of documents."""
    statements = draw(st.lists(STATEMENTS, min_size=1, max_size=4))

    def change(path: Path) -> None:
        with suppress(sqlite3.Error), closing(sqlite3.connect(path, isolation_level=None)) as writer:
            for statement in statements:
                with suppress(sqlite3.Error, UnicodeDecodeError):
                    writer.execute(statement)

    return change


@st.composite
def _entry_damage(draw: st.DrawFn) -> Callable[[Path], None]:
    """Change a value in a description."""
    steps = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    key = draw(st.none() | st.text(max_size=8) | st.sampled_from(["shards", "sha256", "format", "files", "x" * 300]))
    value = draw(JSON)

    def change(path: Path) -> None:
        try:
            table = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return
        inner = table
        for step in steps[:-1]:
            if not isinstance(inner, dict) or not inner:
                return
            below = inner[sorted(inner)[step % len(inner)]]
            if not isinstance(below, dict):
                break
            inner = below
        if isinstance(inner, dict):
            inner[key if key is not None else sorted(inner or ["x"])[steps[-1] % max(len(inner), 1)]] = value
        path.write_text(json.dumps(table))

    return change


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """Draw one to three changes to a collection's files, with or without updating all checksums and sizes."""
    kinds = {
        ".npy": _array_damage() | _bytes_damage() | _kind_damage(),
        ".sqlite": _documents_damage() | _documents_damage() | _bytes_damage() | _kind_damage(),
        ".json": _entry_damage() | _entry_damage() | _bytes_damage() | _kind_damage(),
    }
    kind = st.sampled_from(sorted(kinds)).flatmap(lambda suffix: st.tuples(st.just(suffix), kinds[suffix]))
    changes = draw(st.lists(st.tuples(st.integers(0, 100), kind), min_size=1, max_size=3))
    resealed = draw(st.sampled_from(["no", "index", "all", "all", "all", "all"]))

    def damage(collection: Path) -> None:
        for number, (suffix, change) in changes:
            names = [name for name in files_of(collection) if name.endswith(suffix)]
            if names:
                change(collection / names[number % len(names)])
        if resealed != "no":
            reseal(collection, whole=resealed == "all")

    return damage


def reseal(collection: Path, *, whole: bool) -> None:
    """Update sizes and checksums in every readable description to those of its files."""
    for meta in sorted(collection.glob("segments/*/index/meta.json")):
        _refresh(meta, meta.parent)
    if not whole:
        return
    for contents in sorted(collection.glob("segments/*/segment.json")):
        _refresh(contents, contents.parent)
    for name, kind in (
        (description.DESCRIPTION, description.Description),
        (description.MANIFEST, description.Manifest),
    ):
        path = collection / name
        if not path.is_file():  # a damage may have made it a FIFO, which would be waited for
            continue
        try:
            found: Any = msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if isinstance(found, description.Manifest):
            segments = [_resealed(collection, segment) for segment in found.segments]
            found = msgspec.structs.replace(found, segments=segments)
        path.write_bytes(description.encode_with_checksum(found))


def _resealed(collection: Path, segment: description.SegmentInfo) -> description.SegmentInfo:
    path = collection / "segments" / str(segment.number) / "segment.json"
    if not path.is_file():
        return segment
    return msgspec.structs.replace(segment, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def _refresh(description: Path, folder: Path) -> None:
    if not description.is_file():
        return
    try:
        table = json.loads(description.read_bytes())
    except (ValueError, RecursionError):
        return
    files = table.get("files") if isinstance(table, dict) else None
    if not isinstance(files, dict):
        return
    for name in files:
        try:
            found = (folder / name).is_file()
        except (OSError, ValueError):
            found = False
        if found:
            content = (folder / name).read_bytes()
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    description.write_text(json.dumps(table))


def copied(collection: Path, to: Path) -> Path:
    """Replace a directory by a fresh copy."""
    if to.exists() or to.is_symlink():
        shutil.rmtree(to)
    shutil.copytree(collection, to)
    return to


class Trap:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")
