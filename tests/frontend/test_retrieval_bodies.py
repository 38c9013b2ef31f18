"""Bodies of /v1/retrieval: most are read by a faster parser, which nobody may notice."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.serving.http.parsing import parse
from runtime.serving.http.retrieval_body import FLOAT32_MAX, PlainBody, RetrievalBody, parse_retrieval

NUMBERS = st.floats(width=32) | st.floats() | st.integers() | st.integers(-(2**60), 2**60)
ODD = st.none() | st.booleans() | st.text(max_size=3) | st.lists(NUMBERS, max_size=2)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "vector": st.lists(NUMBERS, max_size=5) | st.lists(NUMBERS | ODD, max_size=5) | ODD,
        "k": st.integers(-1, 70) | st.just(2**31) | NUMBERS | ODD,
        "collection": st.text(max_size=5) | ODD,
        "query": ODD, "filter": ODD, "hybrid": ODD | NUMBERS, "rerank": ODD, "model": ODD,
    },
)  # fmt: skip
Outcome = tuple[object, ...]


def outcome(body: RetrievalBody | PlainBody) -> Outcome:
    vector = None if body.vector is None else (body.vector.dtype, body.vector.tolist())
    return vector, body.k, body.collection or "", body.query, body.filter, body.hybrid, body.rerank


def outcomes(body: bytes) -> list[Outcome]:
    found: list[Outcome] = []
    for read in (lambda: parse(RetrievalBody, body), lambda: parse_retrieval(body)):
        try:
            found.append(outcome(read()))  # type: ignore[no-untyped-call]
        except InvalidRequest as error:
            found.append((type(error), error.message, error.param))
    return found


@given(BODIES)
@settings(max_examples=300)
def test_any_body_is_read_or_refused_as_by_the_model(body: dict[str, Any]) -> None:
    expected, found = outcomes(json.dumps(body).encode())
    assert found == expected


@given(st.binary(max_size=3), st.integers(0, 60), st.integers(0, 3))
@example(b"\xff", 20, 0)
@example(b"]", 20, 1)
@settings(max_examples=300)
def test_a_damaged_body_is_refused_as_by_the_model(inserted: bytes, place: int, removed: int) -> None:
    body = b'{"vector": [0.25, -1.5e3, 7], "k": 3, "collection": "docs"}'
    expected, found = outcomes(body[:place] + inserted + body[place + removed :])
    assert found == expected


@pytest.mark.parametrize("number", [FLOAT32_MAX, -FLOAT32_MAX, np.nextafter(FLOAT32_MAX, np.inf), 1e308])
def test_the_largest_numbers_of_a_vector_are_those_of_float32(number: float) -> None:
    expected, found = outcomes(json.dumps({"vector": [0.0, number]}).encode())
    assert found == expected
    assert (found[0] is InvalidRequest) == (abs(number) > FLOAT32_MAX)


def test_a_body_with_a_vector_or_a_text_is_read_without_the_model() -> None:
    assert isinstance(parse_retrieval(b'{"vector": [1, 2.5], "k": 3}'), PlainBody)
    assert isinstance(parse_retrieval(b'{"query": "text", "collection": null}'), RetrievalBody)
    assert isinstance(parse_retrieval(b'{"query": "text"}'), PlainBody)
