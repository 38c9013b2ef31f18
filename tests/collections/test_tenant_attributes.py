"""Attributes that tenants share: none of them introduces a name, or determines the type that others rely on."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidDocument, InvalidFilter
from runtime.retrieval.attributes.filters import AttributeBinding, Comparison
from runtime.retrieval.attributes.schema import MAX_ATTRIBUTES, AttributeType
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter

DIM = 4
ACME, BLUE = AttributeBinding("tenant", "acme"), AttributeBinding("tenant", "blue")


def document(name: str, **attributes: Any) -> UpsertDocument:
    return UpsertDocument(name, "text", attributes=attributes, vector=np.ones(DIM, np.float32))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    bulk_load.create(tmp_path / "notes", DIM, metric="l2", degree=4, schema={"year": AttributeType.INTEGER})
    return tmp_path / "notes"


def test_a_tenant_introduces_no_attribute_but_its_own(directory: Path) -> None:
    with writer_of(directory) as writer:
        with pytest.raises(InvalidDocument, match=r"'more' is new, and an API key .* introduces none"):
            writer.upsert([document("1", tenant="acme", more=1)], ACME)
        with pytest.raises(InvalidDocument, match="'year' is a string, 'now'; it was an integer before"):
            writer.upsert([document("1", tenant="acme", year="now")], ACME)
        writer.upsert([document("1", tenant="acme", year=2024)], ACME)
        writer.upsert([document("2", more=1)])  # a key without a restriction
        writer.delete(["2"])
        writer.upsert([document("3", tenant="blue", more=2)], BLUE)
    assert found(directory, "more", 2) == ["3"]


@pytest.mark.parametrize("seal", [False, True])
def test_a_name_and_its_type_remain_when_its_last_document_is_gone(directory: Path, seal: bool) -> None:
    with writer_of(directory) as writer:
        writer.upsert([document("all", **{f"n{number}": number for number in range(MAX_ATTRIBUTES - 1)})])
        if seal:
            writer.flush()
        writer.delete(["all"])
        writer.compact()
    with writer_of(directory) as writer:
        with pytest.raises(InvalidDocument, match="exceeds the limit of 64 attributes"):
            writer.upsert([document("one more", more=1)])
        with pytest.raises(InvalidDocument, match="it was an integer before"):
            writer.upsert([document("text", n3="text")])
        writer.upsert([document("new", n3=7)])
    assert found(directory, "n3", 7) == ["new"]


def writer_of(directory: Path) -> CollectionWriter:
    return CollectionWriter(directory, background=False)


def found(directory: Path, key: str, value: Any) -> list[str]:
    """Return the ids of the documents that a reader finds with this value."""
    with CollectionReader(directory) as reader:
        rows, _ = reader.search(np.ones((1, DIM), np.float32), 20, filter=Comparison(key, "eq", (value,)))
        return sorted(one.id for one in reader.documents([row for row in rows[0] if row >= 0]) if one is not None)


@pytest.mark.parametrize("first", ["acme", ["acme"]])
def test_the_attribute_that_keys_are_bound_to_has_the_type_of_the_collection(directory: Path, first: object) -> None:
    with writer_of(directory) as writer:
        writer.upsert([document("1", tenant=first)], ACME)
        writer.upsert([document("2", tenant="blue")], BLUE)
        assert writer.state.schema["tenant"] is AttributeType.STRING
    assert (found(directory, "tenant", "acme"), found(directory, "tenant", "blue")) == (["1"], ["2"])


def test_where_an_unrestricted_key_has_stored_lists_tenants_store_lists(directory: Path) -> None:
    with writer_of(directory) as writer:
        writer.upsert([document("shared", tenant=["acme", "blue"])])
        writer.upsert([document("1", tenant="acme")], ACME)
    assert found(directory, "tenant", "acme") == ["1", "shared"]


def test_errors_name_no_attribute_that_the_filter_does_not(directory: Path) -> None:
    with writer_of(directory) as writer:
        writer.upsert([document("1", secret_project=1)])
        with pytest.raises(InvalidFilter) as raised:
            writer.delete_where(Comparison("unknown", "eq", (1,)))
    assert str(raised.value) == "no document has the attribute 'unknown'"


def test_concurrent_writes_of_different_types_leave_a_log_that_can_be_read(directory: Path) -> None:
    kinds: list[Any] = [1, "text", 2.5, True, ["list"]]

    def write(number: int) -> None:
        for turn in range(12):
            with contextlib.suppress(InvalidDocument):
                writer.upsert([document(f"{number}-{turn}", kind=kinds[(number + turn) % len(kinds)])])
                writer.delete([f"{number}-{turn}"])

    with writer_of(directory) as writer, CollectionReader(directory) as reader:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        reader.poll()
        assert reader.state.count == writer.state.count
    with writer_of(directory) as writer:
        writer.upsert([document("last", other="text")])
        writer.compact()
    assert CollectionReader.verify(directory) == ""
