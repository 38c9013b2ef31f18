"""`trinity index` from an empty directory to a filtered answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launchers.main import command_line
from runtime.errors import BuildRefused, CollectionError, InvalidDocument, InvalidFilter, OutputRefused, UsageError
from runtime.retrieval.collections.log import log_path


def _trinity(*arguments: object) -> str:
    done = CliRunner().invoke(command_line(), [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def _lines(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_control_characters_of_a_document_are_escaped_in_the_terminal(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    _trinity("index", "build", "--out", docs, "--embedder", "hashing-256")
    _trinity("index", "upsert", docs, _lines(tmp_path / "a.jsonl", {"id": "1\x1b[2J", "text": "a \x1b]0;red\x07 fox"}))
    assert _trinity("index", "query", docs, "red fox").split(maxsplit=1)[1] == "1\\x1b[2J  a \\x1b]0;red\\x07 fox\n"


def test_attributes_are_declared_with_their_types(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    declared = ("--attribute", "year=integer", "--attribute", "tags=strings")
    _trinity("index", "build", "--out", docs, "--dim", "3", "--demand", "tenant", *declared)
    info = _trinity("index", "info", docs)
    assert "tags (list of strings), tenant (string), year (integer)" in info
    for wrong in ("year", "year=date", "a b=string", "=string"):
        with pytest.raises(
            BuildRefused, match="give NAME=TYPE; the types are string, integer, float, boolean, strings"
        ):
            _trinity("index", "build", "--out", tmp_path / "other", "--dim", "3", "--attribute", wrong)


def test_documents_are_stored_filtered_replaced_deleted_and_verified(tmp_path: Path) -> None:
    docs, file = tmp_path / "docs", tmp_path / "a.jsonl"
    assert "256 dimensions" in _trinity(
        "index", "build", "--out", docs, "--embedder", "hashing-256", "--demand", "tenant"
    )
    _lines(
        file,
        {"id": "1", "text": "a red fox", "attributes": {"tenant": "a", "year": 1}},
        {"id": "2", "text": "a red fox", "attributes": {"tenant": "b", "year": 2}},
        {"id": "3", "text": "a grey wolf", "attributes": {"tenant": "a", "year": 3}},
    )
    assert "3 documents stored" in _trinity("index", "upsert", docs, file)
    mine = json.dumps({"type": "eq", "key": "tenant", "value": "a"})
    found = _trinity("index", "query", docs, "red fox", "--filter", mine).splitlines()
    assert [line.split()[1] for line in found] == ["1", "3"]

    _trinity("index", "upsert", docs, _lines(file, {"id": "1", "text": "a green frog", "attributes": {"tenant": "a"}}))
    assert ": 1 segment\n" in _trinity("index", "flush", docs)
    assert "green frog" in _trinity("index", "query", docs, "green frog", "--filter", mine).splitlines()[0]
    later = json.dumps({"type": "gte", "key": "year", "value": 3})
    assert "1 document deleted; 2 in the collection" in _trinity("index", "delete", docs, "--filter", later)
    assert "1 document deleted; 1 in the collection" in _trinity("index", "delete", docs, "2", "none")
    assert "tombstones    2" in _trinity("index", "info", docs)
    assert "1 document in 1 segment\n" in _trinity("index", "compact", docs)
    info = _trinity("index", "info", docs)
    assert "tombstones    0" in info
    assert "attributes    tenant (string), year (integer)\n" in info  # although no document is left that has a year
    assert "every checksum is correct" in _trinity("index", "verify", docs)


def test_a_torn_log_is_reported_before_and_when_it_is_truncated(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    _trinity("index", "build", "--out", docs, "--embedder", "hashing-16")
    _trinity("index", "upsert", docs, _lines(tmp_path / "a.jsonl", {"id": "1", "text": "x"}))
    with log_path(docs, 0).open("ab") as file:
        file.write(b"torn")
    assert "the last 4 bytes" in _trinity("index", "verify", docs)
    assert "the last 4 bytes" in _trinity("index", "info", docs)
    _trinity("index", "flush", docs)
    assert "the last" not in _trinity("index", "verify", docs)


def test_invalid_commands_are_refused(tmp_path: Path) -> None:
    docs, file = tmp_path / "docs", tmp_path / "a.jsonl"
    refused: list[tuple[type[Exception], tuple[object, ...]]] = [
        (BuildRefused, ("index", "build", "--out", docs, "--dim", 20_000)),
        (BuildRefused, ("index", "build", "--out", docs, "--dim", 3, "--embedder", "hashing-16")),
    ]
    _trinity("index", "build", "--out", tmp_path / "there", "--dim", "3")
    refused += [
        (OutputRefused, ("index", "build", "--out", tmp_path / "there", "--dim", 3)),
        (CollectionError, ("index", "query", tmp_path / "there", "x")),
        (CollectionError, ("index", "flush", tmp_path)),
        (InvalidDocument, ("index", "upsert", tmp_path / "there", _lines(file, {"id": "1", "colour": {}}))),
        (UsageError, ("index", "delete", tmp_path / "there")),
        (InvalidFilter, ("index", "delete", tmp_path / "there", "--filter", "{")),
        (InvalidFilter, ("index", "delete", tmp_path / "there", "--filter", "[" * 100_000)),
    ]
    for kind, arguments in refused:
        with pytest.raises(kind):
            _trinity(*arguments)


def test_a_refused_batch_is_reported_with_what_was_stored_before(tmp_path: Path) -> None:
    docs, file = tmp_path / "docs", tmp_path / "a.jsonl"
    _trinity("index", "build", "--out", docs, "--dim", "3")
    file.write_text('{"id": "1", "vector": [1, 0, 0]}\n{"id": "2", "vector": [1, 0]}\n')
    with pytest.raises(InvalidDocument, match=r"vector of document '2'.*; stored before: 1 document$"):
        _trinity("index", "upsert", docs, file, "--batch", 1)
    with pytest.raises(InvalidDocument, match=r"have 3 dimensions$"):
        _trinity("index", "upsert", docs, file)


def test_documents_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    docs, file = tmp_path / "docs", tmp_path / "a.jsonl"
    file.write_text('{"id": "1", "vector": [1, 0, 0]}\n', encoding="utf-8-sig")
    _trinity("index", "build", "--out", docs, "--dim", "3")
    assert "1 document stored" in _trinity("index", "upsert", docs, file)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "1", "vector": [1e300, 0, 0]}', "every value must be finite"),
        ('{"id": "1", "text": "\\ud800"}', "line 1: not valid UTF-8: an unpaired surrogate"),
    ],
)
def test_an_invalid_line_is_reported_with_the_reason(tmp_path: Path, line: str, says: str) -> None:
    docs, file = tmp_path / "docs", tmp_path / "a.jsonl"
    file.write_text(line)
    _trinity("index", "build", "--out", docs, "--dim", "3")
    with pytest.raises(InvalidDocument, match=says):
        _trinity("index", "upsert", docs, file)
