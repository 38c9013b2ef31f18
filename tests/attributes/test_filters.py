"""Filters: semantics compared with plain Python, and refusals with their reason."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from runtime.errors import InvalidDocument, InvalidFilter
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.filters import (
    MAX_COMPARISONS,
    MAX_DEPTH,
    MAX_VALUES,
    AttributeBinding,
    binds,
    both_filters,
    canonical,
    check_filter,
    parse_filter,
)
from runtime.retrieval.attributes.schema import MAX_ATTRIBUTES, AttributeType, Schema, extend_schema
from runtime.retrieval.passages import Attribute

SCHEMA = {
    "name": AttributeType.STRING,
    "year": AttributeType.INTEGER,
    "price": AttributeType.FLOAT,
    "sold": AttributeType.BOOLEAN,
    "tags": AttributeType.STRINGS,
}
_WORDS = some.sampled_from(["", "a", "b", "ab", "é", "z" * 40])
_INTEGERS = some.one_of(some.integers(-3, 3), some.integers(-(1 << 63), (1 << 63) - 1))
_FLOATS = some.one_of(some.sampled_from([-1.5, 0.0, 0.5, 1.0, 2.0**53, 2.0**63, -1e300]), some.integers(-3, 3))
_VALUES: dict[str, Any] = {"name": _WORDS, "year": _INTEGERS, "price": _FLOATS, "sold": some.booleans()}
_DOCUMENTS = some.lists(
    some.fixed_dictionaries({}, optional={**_VALUES, "tags": some.lists(_WORDS, max_size=4)}), max_size=12
)


def _comparisons(key: str) -> some.SearchStrategy[dict[str, Any]]:
    value = _WORDS if key == "tags" else _INTEGERS | _FLOATS if key in ("year", "price") else _VALUES[key]
    ordered = [] if key in ("sold", "tags") else ["gt", "gte", "lt", "lte"]
    one = some.fixed_dictionaries(
        {"type": some.sampled_from(["eq", "ne", *ordered]), "key": some.just(key), "value": value}
    )
    several = some.fixed_dictionaries(
        {"type": some.sampled_from(["in", "nin"]), "key": some.just(key), "value": some.lists(value, max_size=4)}
    )
    return one | several


def _joined(inner: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    parts = some.lists(inner, min_size=1, max_size=3)
    return some.fixed_dictionaries({"type": some.sampled_from(["and", "or"]), "filters": parts}) | (
        some.fixed_dictionaries({"type": some.just("not"), "filter": inner})
    )


_FILTERS = some.recursive(some.one_of([_comparisons(key) for key in SCHEMA]), _joined, max_leaves=6)


def _passes(document: dict[str, Any], wanted: dict[str, Any]) -> bool:
    kind = wanted["type"]
    if kind in ("and", "or"):
        return (all if kind == "and" else any)(_passes(document, part) for part in wanted["filters"])
    if kind == "not":
        return not _passes(document, wanted["filter"])
    if kind in ("ne", "nin"):
        return not _passes(document, {**wanted, "type": {"ne": "eq", "nin": "in"}[kind]})
    if wanted["key"] not in document:
        return False
    own, value = document[wanted["key"]], wanted["value"]
    if isinstance(own, list):
        return any(item in own for item in value) if kind == "in" else value in own
    if kind == "in":
        return own in value
    return bool(
        {"eq": own == value, "gt": own > value, "gte": own >= value, "lt": own < value, "lte": own <= value}[kind]
    )


def _depth(wanted: dict[str, Any]) -> int:
    inner = wanted.get("filters", [wanted["filter"]] if "filter" in wanted else [])
    return 1 + max(map(_depth, inner), default=0)


@settings(max_examples=60)
@given(documents=_DOCUMENTS, wanted=_FILTERS)
def test_a_filter_matches_a_plain_python_reference(documents: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    if _depth(wanted) <= MAX_DEPTH:
        _check_matching(documents, wanted)


@settings(max_examples=200)
@given(
    documents=some.lists(some.fixed_dictionaries({**_VALUES, "tags": some.lists(_WORDS, max_size=4)}), min_size=3),
    joint=some.sampled_from(["and", "or"]),
    parts=some.sampled_from(sorted(SCHEMA)).flatmap(lambda key: some.lists(_comparisons(key), min_size=2, max_size=5)),
    others=some.lists(some.one_of([_comparisons(key) for key in SCHEMA]), max_size=2),
)
def test_comparisons_of_one_attribute_in_one_and_or_or_match_a_plain_python_reference(
    documents: list[dict[str, Any]], joint: str, parts: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    _check_matching([*documents, {}], {"type": joint, "filters": [*parts, *others]})


def _check_matching(documents: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    parsed = parse_filter(wanted)
    check_filter(parsed, SCHEMA)
    columns = Columns.from_documents(documents, SCHEMA)
    # A float column keeps integers as floats, as any reader of it would see them.
    seen = [{**d, "price": float(d["price"])} if "price" in d else d for d in documents]
    expected = [_passes(document, wanted) for document in seen]

    assert columns.matching(parsed).tolist() == expected
    assert Columns.decode(columns.encode()).matching(parsed).tolist() == expected


@given(documents=_DOCUMENTS, key=some.sampled_from(["name", "year", "tags", "missing"]), value=_WORDS)
@example(documents=[{"tags": ["a", "b"]}], key="tags", value="a")
def test_an_owner_holds_the_same_documents_stored_as_it_may_write(
    documents: list[dict[str, Any]], key: str, value: str
) -> None:
    owner, stored = AttributeBinding(key, value), Columns.from_documents(documents, SCHEMA)
    for columns in (stored, Columns.decode(stored.encode())):
        assert columns.held_by(owner, np.arange(columns.size)).tolist() == [
            owner.holds(document) for document in documents
        ]
    shared = [document for document in documents if len(set(document.get("tags", ()))) > 1]
    assert not any(AttributeBinding("tags", value).holds(document) for document in shared)


def test_equivalent_filters_have_one_canonical_form() -> None:
    year, name = {"type": "gt", "key": "year", "value": 3}, {"type": "in", "key": "name", "value": ["b", "a", "b"]}
    turned = {"type": "in", "key": "name", "value": ["a", "b"]}
    one = {"type": "and", "filters": [year, name, {"type": "ne", "key": "sold", "value": True}]}
    negated = {"type": "not", "filter": {"type": "eq", "key": "sold", "value": True}}
    other = {"type": "and", "filters": [{"type": "and", "filters": [negated, turned]}, year, year]}

    assert canonical(parse_filter(one)) == canonical(parse_filter(other))
    assert canonical(parse_filter(year)) != canonical(parse_filter({**year, "value": 3.0}))


def _deep(depth: int) -> dict[str, Any]:
    wanted: dict[str, Any] = {"type": "eq", "key": "name", "value": "a"}
    for _ in range(depth - 1):
        wanted = {"type": "not", "filter": wanted}
    return wanted


_ONE = {"type": "eq", "key": "name", "value": "a"}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (_deep(MAX_DEPTH + 1), "9 levels; the limit is 8"),
        (_deep(100_000), "100000 levels; the limit is 8"),
        ("name = a", "must be an object"),
        ({}, "the type of a filter"),
        ({"type": "like", "key": "name", "value": "a"}, "'like'"),
        ({"type": ["eq"], "key": "name", "value": "a"}, "the type of a filter"),
        ({**_ONE, "negate": True}, "'negate'"),
        ({"type": "eq", "key": "name"}, "key, type, value"),
        ({"type": "eq", "key": 7, "value": 1}, "name of an attribute"),
        ({"type": "eq", "key": "name", "value": None}, "not null"),
        ({"type": "eq", "key": "name", "value": "\ud800"}, "surrogate"),
        ({"type": "eq", "key": "year", "value": 1 << 63}, "64 bits"),
        ({"type": "eq", "key": "year", "value": 10**5000}, "a number of over 4,300 digits"),
        ({"type": 10**5000}, "a number of over 4,300 digits"),
        ({"type": "eq", "key": "\ud800", "value": 1}, "name of an attribute"),
        ({"type": "eq", "key": "a" * 10**6, "value": 1}, "name of an attribute"),
        ({"type": "eq", "key": "year", "value": float("nan")}, "finite"),
        ({"type": "in", "key": "name", "value": "a"}, "list of values"),
        ({"type": "in", "key": "year", "value": list(range(MAX_VALUES + 1))}, "1025 values"),
        ({"type": "and", "filters": []}, "list of filters"),
        ({"type": "or", "filters": [_ONE] * (MAX_COMPARISONS + 1)}, "limit is 128"),
        ({"type": "or", "filters": [{"type": "and", "filters": [_ONE] * 65}] * 2}, "more than 128 comparisons"),
    ],
)
def test_invalid_filters_and_filters_over_a_limit_are_refused_with_the_reason(wanted: object, said: str) -> None:
    with pytest.raises(InvalidFilter, match=said) as caught:
        parse_filter(wanted)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"type": "eq", "key": "colour", "value": "a"}, "no document has the attribute 'colour'"),
        ({"type": "eq", "key": "name", "value": 3}, "'name' is a string; it cannot be compared with 3"),
        ({"type": "eq", "key": "year", "value": True}, "'year' is an integer"),
        ({"type": "in", "key": "year", "value": [1, True]}, "cannot be compared with true"),
        ({"type": "eq", "key": "sold", "value": 1}, "'sold' is a boolean"),
        ({"type": "gt", "key": "sold", "value": False}, "no order"),
        ({"type": "lt", "key": "tags", "value": "a"}, "no order"),
    ],
)
def test_a_filter_with_mismatched_attribute_types_is_refused(wanted: object, said: str) -> None:
    with pytest.raises(InvalidFilter, match=said):
        check_filter(parse_filter(wanted), SCHEMA)


def test_a_required_attribute_is_bound_in_every_branch_of_the_filter() -> None:
    other = {"type": "gt", "key": "year", "value": 1}
    assert binds(parse_filter(_ONE), "name")
    assert binds(parse_filter({"type": "and", "filters": [other, _ONE]}), "name")
    assert binds(parse_filter({"type": "or", "filters": [_ONE, {"type": "and", "filters": [_ONE, other]}]}), "name")
    assert not binds(None, "name")
    assert not binds(parse_filter({"type": "or", "filters": [_ONE, other]}), "name")
    assert not binds(parse_filter({"type": "not", "filter": _ONE}), "name")
    assert not binds(parse_filter({"type": "gte", "key": "name", "value": ""}), "name")
    assert binds(both_filters(parse_filter(other), parse_filter(_ONE)), "name")


def test_an_attribute_keeps_its_first_type() -> None:
    schema: Schema = extend_schema({}, {"year": 2020, "price": 1.5, "tags": ["a"], "sold": False, "name": "x"})
    assert schema == SCHEMA
    assert extend_schema(schema, {"price": 2}) == schema
    others: dict[str, Attribute] = {"year": 1.5, "sold": 1, "name": ["a"], "tags": "a", "price": True}
    for name, value in others.items():
        with pytest.raises(InvalidDocument, match=f"{name!r} is an? .*; it was {SCHEMA[name].with_article} before"):
            extend_schema(schema, {name: value})


@pytest.mark.parametrize(
    "attributes",
    [
        {"a b": 1},
        {"": 1},
        {"year": None},
        {"year": {"of": 1}},
        {"year": 1 << 63},
        {"year": 10**5000},
        {"tags": [10**5000]},
        {"a" * 10**6: 1 << 63},
        {"price": float("inf")},
        {"tags": ["a", 1]},
        {"tags": ["a"] * 257},
        {"name": "é" * 2049},
        {"name": "\ud800"},
        {f"a{number}": 1 for number in range(MAX_ATTRIBUTES + 1)},
    ],
)
def test_invalid_attributes_are_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocument, match="attribute") as caught:
        extend_schema({}, attributes)
    assert len(caught.value.message) < 500
