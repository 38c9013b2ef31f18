"""Attributes that tenants share: none uses up their names, claims the types that others rely on, or keeps a name whose
last document is gone."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidDocument, InvalidFilter
from runtime.retrieval.attributes.filters import AttributeBinding, Comparison
from runtime.retrieval.attributes.schema import MAX_ATTRIBUTES, AttributeType, Schema
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections import collection as live
from runtime.retrieval.collections.operations import Upsert
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.tenant_attributes import MAX_INTRODUCED, MAX_SHARED
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter

DIM = 4
ACME, BLUE = AttributeBinding("tenant", "acme"), AttributeBinding("tenant", "blue")


def document(name: str, **attributes: Any) -> UpsertDocument:
    return UpsertDocument(name, "text", attributes=attributes, vector=np.ones(DIM, np.float32))


def names(prefix: str, count: int) -> dict[str, int]:
    return {f"{prefix}{number:02}": number for number in range(count)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    bulk_load.create(tmp_path / "notes", DIM, metric="l2", degree=4, schema={"year": AttributeType.INTEGER})
    return tmp_path / "notes"


def writer_of(directory: Path) -> CollectionWriter:
    return CollectionWriter(directory, background=False, bound_attributes=("tenant", "team"))


def found(directory: Path, key: str, value: Any) -> list[str]:
    """Return the ids of the documents that a reader finds with this value."""
    with CollectionReader(directory) as reader:
        rows, _ = reader.search(np.ones((1, DIM), np.float32), 20, filter=Comparison(key, "eq", (value,)))
        return sorted(one.id for one in reader.documents([row for row in rows[0] if row >= 0]) if one is not None)


def test_a_tenant_introduces_a_limited_number_of_names_and_the_others_are_not_affected(directory: Path) -> None:
    with writer_of(directory) as writer:
        own = names("a", MAX_INTRODUCED)
        writer.upsert([document("1", tenant="acme", year=2024, **own)], ACME)
        with pytest.raises(InvalidDocument, match=r"'more' is new: .* introduced 9 attributes; the limit is 8"):
            writer.upsert([document("2", tenant="acme", more=1)], ACME)
        writer.upsert([document("2", tenant="acme", a03=1)], ACME)
        with pytest.raises(InvalidDocument, match="introduced 9"):
            writer.upsert([document("3", tenant="blue", **names("b", 9))], BLUE)
        writer.upsert([document("3", tenant="blue", a01=1, **names("b", MAX_INTRODUCED))], BLUE)
        writer.upsert([document("4", tenant="red", operator=1)])  # a key without a restriction
        writer.upsert([document("5", tenant="acme", operator=2)], ACME)


def test_all_tenants_together_leave_names_for_others(directory: Path) -> None:
    with writer_of(directory) as writer:
        for tenant in range(MAX_SHARED // MAX_INTRODUCED + 1):
            owner = AttributeBinding("tenant", str(tenant))
            given = document(str(tenant), tenant=str(tenant), **names(f"t{tenant}-", MAX_INTRODUCED))
            if len(writer.state.schema) + MAX_INTRODUCED > MAX_SHARED:
                with pytest.raises(
                    InvalidDocument, match=rf"may introduce some up to {MAX_SHARED} of {MAX_ATTRIBUTES}"
                ):
                    writer.upsert([given], owner)
            else:
                writer.upsert([given], owner)
        writer.upsert([document("all", **names("o", MAX_ATTRIBUTES - len(writer.state.schema)))])
        with pytest.raises(InvalidDocument, match="exceeds the limit of 64 attributes"):
            writer.upsert([document("all", last=1)])


@pytest.mark.parametrize("seal", [False, True])
def test_names_whose_last_document_is_gone_are_free_for_any_type(directory: Path, seal: bool) -> None:
    with writer_of(directory) as writer, CollectionReader(directory) as reader:
        for round_number, kind in enumerate((1, "text", ["list"], 2.5, True)):
            given = {f"n{round_number}-{number}": kind for number in range(MAX_ATTRIBUTES - 2)}
            writer.upsert([document("all", again=kind, **given), document("other", year=2024)])
            if seal:
                writer.flush()
            with pytest.raises(InvalidDocument, match="exceeds the limit"):
                writer.upsert([document("one more", more=1)])
            writer.delete(["all"])
            reader.poll()
            writer.upsert([document("one more", more=1)])
            reader.poll()
            assert found(directory, "more", 1) == ["one more"]
            writer.delete(["one more"])
    with writer_of(directory) as writer:
        writer.upsert([document("new", again="text")])
        writer.compact()
        assert writer.state.schema == {"year": AttributeType.INTEGER, "again": AttributeType.STRING}
        assert found(directory, "again", "text") == ["new"]
    assert live.Collection.verify(directory) == ""
    assert set(schema_of(directory)) == {"year", "again"}


def schema_of(directory: Path) -> Schema:
    with live.Collection.open(directory) as opened:
        return opened.state.schema


@pytest.mark.parametrize("shards", [1, 2])
def test_a_name_changes_its_type_in_every_reader(tmp_path: Path, shards: int) -> None:
    directory = tmp_path / "notes"
    bulk_load.create(directory, DIM, metric="l2", degree=4, shards=shards)
    readers = [CollectionReader(directory, shard=shard) for shard in range(shards)]
    with writer_of(directory) as writer:
        writer.upsert([document(str(number), kind=number) for number in range(8)])
        writer.flush()
        writer.upsert([document(str(number), kind=number) for number in range(8, 12)])
        for reader in readers:
            reader.poll()
        with pytest.raises(InvalidDocument, match="it was an integer before"):
            writer.upsert([document("a", kind="text")])
        writer.delete([str(number) for number in range(12)])
        writer.upsert([document("a", kind="text"), document("b", kind="text")])
        matching = Comparison("kind", "eq", ("text",))
        for _ in range(2):
            rows: list[int] = []
            for reader in readers:
                reader.poll()
                rows += reader.state.rows_passing(matching).tolist()
            assert sorted(rows) == [12, 13]
            with pytest.raises(InvalidFilter, match="'kind' is a string; it cannot be compared with 3"):
                readers[0].state.rows_passing(Comparison("kind", "eq", (3,)))
            writer.flush()
    for reader in readers:
        reader.close()
    assert live.Collection.verify(directory) == ""


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


@pytest.mark.parametrize("claimed", [["x"], 1, True])
def test_a_tenant_cannot_claim_the_type_of_an_attribute_that_other_keys_are_bound_to(
    directory: Path, claimed: object
) -> None:
    with writer_of(directory) as writer:
        with pytest.raises(InvalidDocument, match="API keys are bound to it, so it must be a string"):
            writer.upsert([document("1", tenant="acme", team=claimed)], ACME)
        with pytest.raises(InvalidDocument, match="'year' is a string, 'now'; it was an integer before"):
            writer.upsert([document("1", tenant="acme", year="now")], ACME)  # declared when it was created
        writer.upsert([document("1", tenant="acme", team="x")], ACME)


def test_a_tenant_that_deletes_its_documents_does_not_keep_more_names_than_it_may(directory: Path) -> None:
    with writer_of(directory) as writer:
        for number in range(3):
            writer.upsert([document("1", tenant="acme", **names(f"n{number}-", MAX_INTRODUCED))], ACME)
            if number < 2:
                writer.delete(["1"], ACME)
        with pytest.raises(InvalidDocument, match="the limit is 8"):
            writer.upsert([document("2", tenant="acme", **names("n0-", 1))], ACME)


@pytest.mark.parametrize("seal", [False, True])
def test_a_name_counts_for_the_key_that_wrote_it_first_also_after_that_keys_documents_are_gone(
    directory: Path, seal: bool
) -> None:
    own = names("n", MAX_INTRODUCED)
    with writer_of(directory) as writer:
        writer.upsert([document("1", tenant="acme", **own)], ACME)
        writer.upsert([document("2", tenant="blue", **own)], BLUE)
        writer.delete(["1"], ACME)
        if seal:
            writer.flush()
    with writer_of(directory) as writer:  # as another process
        writer.upsert([document("3", tenant="blue", **names("b", MAX_INTRODUCED))], BLUE)
        with pytest.raises(InvalidDocument, match="introduced 9"):
            writer.upsert([document("4", tenant="acme", more=1)], ACME)
        writer.delete(["2"], BLUE)  # the last documents with acme's names
        writer.upsert([document("5", **names("n", 4))])  # now the operator's
        writer.upsert([document("4", tenant="acme", **names("a", MAX_INTRODUCED))], ACME)


def test_errors_name_no_attribute_that_the_filter_does_not(directory: Path) -> None:
    with writer_of(directory) as writer:
        writer.upsert([document("1", secret_project=1)])
        with pytest.raises(InvalidFilter) as raised:
            writer.delete_where(Comparison("unknown", "eq", (1,)))
    assert str(raised.value) == "no document has the attribute 'unknown'"


def test_writes_that_share_a_record_agree_on_the_type_of_a_free_name(directory: Path) -> None:
    """A name is free, but still known, when the first write of a record uses it, and another takes it with its type."""
    with writer_of(directory) as writer, CollectionReader(directory) as reader:
        for first, second in ((1, "text"), ("text", 1)):
            writer.upsert([document("old", kind=2)])
            writer.delete(["old"])
            state = writer.state
            one = state.extended_schema(state.schema, [{"kind": first}])
            pending = [Upsert(state.growing.next_row, ["a"], [""], [""], [{"kind": first}], bytes(4 * DIM), [])]
            with pytest.raises(InvalidDocument, match="'kind' is"):
                state.extended_schema(one, [{"kind": second}], pending)
            writer.upsert([document("a", kind=first)])
            reader.poll()
            writer.delete(["a"])
        reader.poll()


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
        writer.upsert([document("last", kind="text")])
        writer.compact()
    assert live.Collection.verify(directory) == ""
