"""Evaluation of filters: the passes over the rows that it takes, and its limits."""

from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.errors import InvalidFilter
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.attributes.schema import AttributeType


def _strings(count: int) -> Columns:
    documents = (
        {"name": f"n{number:05}", "team": f"t{number % 7}", "tags": [f"g{number % 5}"]} for number in range(count)
    )
    schema = {"name": AttributeType.STRING, "team": AttributeType.STRING, "tags": AttributeType.STRINGS}
    return Columns.from_documents(documents, schema)


@pytest.mark.parametrize("count", [3, 30])
@pytest.mark.parametrize("operator", ["in", "nin"])
def test_few_values_and_many_are_found_alike(operator: str, count: int) -> None:
    names = [f"n{number:05}" for number in range(0, 3 * count, 3)]
    passing = _strings(100).matching(parse_filter({"type": operator, "key": "name", "value": names}))
    assert passing.tolist() == [(number % 3 == 0 and number < 3 * count) is (operator == "in") for number in range(100)]


def test_a_filter_that_is_too_much_work_is_refused_before_it_begins() -> None:
    columns, passes = _strings(1000), []
    parts = [
        {"type": "and", "filters": [
            {"type": "gt", "key": "name", "value": f"n{number:05}"},
            {"type": "ne", "key": "team", "value": f"t{number % 7}"},
        ]}
        for number in range(20)
    ]  # fmt: skip
    wanted = parse_filter({"type": "or", "filters": parts})
    with pytest.raises(InvalidFilter, match=r"compares 5\d,\d\d\d values; the limit is 10,000: use fewer comparisons"):
        columns.matching(wanted, Work(lambda: passes.append(1), 10_000))
    assert not passes
    assert columns.matching(wanted, Work(limit=60_000)).any()


@pytest.mark.parametrize(("joint", "operator"), [("or", "eq"), ("or", "in"), ("and", "ne"), ("and", "nin")])
def test_many_values_in_comparisons_of_one_attribute_are_as_much_work_as_in_one(joint: str, operator: str) -> None:
    columns, names = _strings(1000), [f"n{number:05}" for number in range(0, 508, 4)]
    parts = [
        {"type": operator, "key": "name", "value": [name] if operator in ("in", "nin") else name} for name in names
    ]
    other = {"type": "eq", "key": "team", "value": "t1"}
    found = columns.matching(parse_filter({"type": joint, "filters": [*parts, other]}), Work(limit=9_400))
    listed = [number % 4 == 0 and number < 508 for number in range(1000)]
    assert found.tolist() == [
        one or number % 7 == 1 if joint == "or" else not one and number % 7 == 1 for number, one in enumerate(listed)
    ]


def test_an_evaluation_can_be_ended_between_two_passes() -> None:
    columns, wanted = _strings(100), parse_filter({"type": "or", "filters": [
        {"type": "gt", "key": "name", "value": "n00050"}, {"type": "eq", "key": "team", "value": "t1"},
    ]})  # fmt: skip
    allowed = iter([None])
    with pytest.raises(StopIteration):
        columns.matching(wanted, Work(lambda: next(allowed)))


def test_rows_appended_later_do_not_change_the_result_for_the_first_rows() -> None:
    documents: list[dict[str, Any]] = [
        {"name": f"n{(7 * number) % 50:02}", "tags": [f"g{number % 3}"], "year": number % 9} for number in range(50)
    ]
    schema = {"name": AttributeType.STRING, "tags": AttributeType.STRINGS, "year": AttributeType.INTEGER}
    growing = Columns()
    wanted = parse_filter({"type": "or", "filters": [
        {"type": "lt", "key": "name", "value": "n20"}, {"type": "in", "key": "tags", "value": ["g1", "new"]},
        {"type": "gte", "key": "year", "value": 7.5},
    ]})  # fmt: skip
    for count, document in enumerate(documents, 1):
        growing.append([document], schema)
        assert (
            growing.matching(wanted).tolist()
            == Columns.from_documents(documents[:count], schema).matching(wanted).tolist()
        )
    assert growing.matching(wanted, size=20).tolist() == growing.matching(wanted).tolist()[:20]


def test_a_stored_dictionary_in_any_order_is_read() -> None:
    words = [f"w{(37 * number) % 20_000:05}" for number in range(20_000)]  # as earlier versions wrote them
    rows, codes = np.arange(20_000, dtype=np.int64), np.arange(20_000, dtype=np.int32)
    column = (AttributeType.STRING, rows.tobytes(), codes.tobytes(), words)
    columns = Columns.decode(msgspec.msgpack.encode((20_000, {"name": column})))
    wanted = parse_filter({"type": "gte", "key": "name", "value": "w19990"})
    assert [words[row] for row in np.flatnonzero(columns.matching(wanted))] == [
        word for word in words if word >= "w19990"
    ]
    again = Columns.decode(columns.encode())
    assert again.matching(wanted).tolist() == columns.matching(wanted).tolist()
