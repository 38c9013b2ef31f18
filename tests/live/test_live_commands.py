"""`trinity live` from an empty directory to a filtered answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launchers.main import command_line
from runtime.errors import BuildRefused, CollectionError, InvalidDocument, InvalidFilter, OutputRefused, UsageError
from runtime.retrieval.live.storage.disk import LOCK
from runtime.retrieval.live.storage.log import log_path


def _trinity(*arguments: object) -> str:
    done = CliRunner().invoke(command_line(), [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def _lines(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_control_characters_of_a_document_are_escaped_in_the_terminal(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    _trinity("live", "create", docs, "--embedder", "hashing-256")
    _trinity("live", "upsert", docs, _lines(tmp_path / "a.jsonl", {"id": "1\x1b[2J", "text": "a \x1b]0;red\x07 fox"}))
    assert _trinity("live", "search", docs, "red fox").split(maxsplit=1)[1] == "1\\x1b[2J  a \\x1b]0;red\\x07 fox\n"


def test_attributes_are_declared_with_their_types(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    declared = ("--attribute", "year=integer", "--attribute", "tags=strings")
    _trinity("live", "create", docs, "--dim", "3", "--demand", "tenant", *declared)
    info = _trinity("index", "info", docs)
    assert "tags (list of strings), tenant (string), year (integer)" in info
    for wrong in ("year", "year=date", "a b=string", "=string"):
        with pytest.raises(
            BuildRefused, match="give NAME=TYPE; the types are string, integer, float, boolean, strings"
        ):
            _trinity("live", "create", tmp_path / "other", "--dim", "3", "--attribute", wrong)


def test_documents_are_stored_filtered_replaced_deleted_and_verified(tmp_path: Path) -> None:
    docs, file = tmp_path / "docs", tmp_path / "a.jsonl"
    assert "256 dimensions" in _trinity("live", "create", docs, "--embedder", "hashing-256", "--demand", "tenant")
    _lines(
        file,
        {"id": "1", "text": "a red fox", "attributes": {"tenant": "a", "year": 1}},
        {"id": "2", "text": "a red fox", "attributes": {"tenant": "b", "year": 2}},
        {"id": "3", "text": "a grey wolf", "attributes": {"tenant": "a", "year": 3}},
    )
    assert "3 documents stored" in _trinity("live", "upsert", docs, file)
    mine = json.dumps({"type": "eq", "key": "tenant", "value": "a"})
    found = _trinity("live", "search", docs, "red fox", "--filter", mine).splitlines()
    assert [line.split()[1] for line in found] == ["1", "3"]

    _trinity("live", "upsert", docs, _lines(file, {"id": "1", "text": "a green frog", "attributes": {"tenant": "a"}}))
    assert "1 segments" in _trinity("live", "flush", docs)
    assert "green frog" in _trinity("live", "search", docs, "green frog", "--filter", mine).splitlines()[0]
    later = json.dumps({"type": "gte", "key": "year", "value": 3})
    assert "1 documents deleted; 2 in the collection" in _trinity("live", "delete", docs, "--filter", later)
    assert "1 documents deleted; 1 in the collection" in _trinity("live", "delete", docs, "2", "none")
    assert "tombstones  2" in _trinity("index", "info", docs)
    assert "1 documents in 1 segments" in _trinity("live", "compact", docs)
    info = _trinity("index", "info", docs)
    assert "tombstones  0" in info
    assert "attributes  tenant (string)\n" in info  # no document is left that has a year
    assert "every checksum is correct" in _trinity("index", "verify", docs)


def test_a_torn_log_is_reported_before_and_when_it_is_truncated(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    _trinity("live", "create", docs, "--embedder", "hashing-16")
    _trinity("live", "upsert", docs, _lines(tmp_path / "a.jsonl", {"id": "1", "text": "x"}))
    with log_path(docs, 0).open("ab") as file:
        file.write(b"torn")
    assert "the last 4 bytes" in _trinity("index", "verify", docs)
    assert "the last 4 bytes" in _trinity("index", "info", docs)
    _trinity("live", "flush", docs)
    assert "the last" not in _trinity("index", "verify", docs)


def test_invalid_commands_are_refused(tmp_path: Path) -> None:
    docs, file = tmp_path / "docs", tmp_path / "a.jsonl"
    refused: list[tuple[type[Exception], tuple[object, ...]]] = [
        (BuildRefused, ("live", "create", docs, "--dim", 20_000)),
        (BuildRefused, ("live", "create", docs, "--dim", 3, "--embedder", "hashing-16")),
    ]
    _trinity("live", "create", tmp_path / "there", "--dim", "3")
    refused += [
        (OutputRefused, ("live", "create", tmp_path / "there", "--dim", 3)),
        (CollectionError, ("live", "search", tmp_path / "there", "x")),
        (CollectionError, ("live", "flush", tmp_path)),
        (InvalidDocument, ("live", "upsert", tmp_path / "there", _lines(file, {"id": "1", "colour": {}}))),
        (UsageError, ("live", "delete", tmp_path / "there")),
        (InvalidFilter, ("live", "delete", tmp_path / "there", "--filter", "{")),
        (InvalidFilter, ("live", "delete", tmp_path / "there", "--filter", "[" * 100_000)),
    ]
    for kind, arguments in refused:
        with pytest.raises(kind):
            _trinity(*arguments)


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
    _trinity("live", "create", docs, "--dim", "3")
    with pytest.raises(InvalidDocument, match=says):
        _trinity("live", "upsert", docs, file)


def test_commands_for_the_other_kind_of_collection_name_its_kind(tmp_path: Path) -> None:
    live, built = tmp_path / "live", tmp_path / "built"
    _trinity("live", "create", live, "--dim", "16")
    file = _lines(
        tmp_path / "a.jsonl", {"id": "1", "text": "one"}, {"id": "2", "text": "two"}, {"id": "3", "text": "x"}
    )
    _trinity("index", "build", file, "--out", built, "--embedder", "hashing-16", "--degree", "2", "--threads", "1")
    with pytest.raises(CollectionError, match="is not a live collection, but one of `trinity index build`"):
        _trinity("live", "upsert", built, file)
    assert not (built / LOCK).exists(), "a build has no other files"
    with pytest.raises(CollectionError, match="is a live collection: use the commands of `trinity live`"):
        _trinity("index", "add", file, "--out", live)
