"""Tests of argument validation in `SearchClient`: errors name the argument, and nothing is sent."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from runtime import SearchClient
from runtime.errors import InvalidRequest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 1.5}, "k must be an integer, not 1.5"),
        ({"k": True}, "k must be an integer, not True"),
        ({"k": None}, "k must be an integer, not None"),
        ({"k": 0}, r"k is 0, outside 1\.\.65535"),
        ({"k": -1}, r"k is -1, outside 1\.\.65535"),
        ({"k": 2**62}, r"k is 4611686018427387904, outside 1\.\.65535"),
        ({"k": np.int64(65_536)}, r"k is 65536, outside 1\.\.65535"),
        ({"k": 9, "top_m": 8}, "k is 9, more than top_m, which is 8"),
        ({"top_m": "64"}, "top_m must be an integer, not '64'"),
        ({"top_m": 0}, r"top_m is 0, outside 1\.\.65535"),
        ({"search_width": 0}, r"search_width is 0, outside 1\.\.65535"),
        ({"patience": 0}, r"patience is 0, outside 1\.\.65535"),
        ({"deadline_ms": float("nan")}, "deadline_ms is nan"),
        ({"deadline_ms": 1e30}, "deadline_ms is 1e\\+30"),
        ({"deadline_ms": 0}, "deadline_ms is 0, allowed are above 0 to 86400000"),
        ({"deadline_ms": "5"}, "deadline_ms must be a number, not '5'"),
        ({"deadline_ms": True}, "deadline_ms must be a number, not True"),
        ({"collection": ["a"]}, r"collection must be a name, not \['a'\]"),
        ({"stage": "later"}, "stage must be one of .* not 'later'"),
    ],
)
def test_a_wrong_argument_is_rejected_with_its_name_and_value(arguments: dict[str, Any], words: str) -> None:
    with SearchClient([], "test") as client:
        with pytest.raises(InvalidRequest, match=words) as refused:
            client.search([0.0], **arguments)
        assert refused.value.param == next(iter(arguments))
        none: tuple[npt.ArrayLike, ...] = ([], np.empty((0, 4)))
        for nothing in none:
            with pytest.raises(InvalidRequest, match=words):
                client.search_batch(nothing, **arguments)


@pytest.mark.parametrize("deadline_ns", [-1, 2**63, 1.5, True])
def test_an_out_of_range_deadline_is_rejected(deadline_ns: Any) -> None:
    with SearchClient([], "test") as client, pytest.raises(InvalidRequest, match="deadline_ns") as refused:
        client.submit([0.0], 1, collection="docs", deadline_ns=deadline_ns)
    assert refused.value.param == "deadline_ns"


@pytest.mark.parametrize(
    ("vector", "words"),
    [
        ([0.0, float("nan")], r"vector\[1\] is nan: not finite"),
        ([float("-inf"), 0.0], r"vector\[0\] is -inf: not finite"),
        ([[0.0]], r"shape \(d,\), got \(1, 1\)"),
        (1.0, r"shape \(d,\), got \(\)"),
        ([1j], "its type is complex128"),
        (["1"], "its type is <U1"),
        (np.array(["2020-01-01"], "M8[D]"), "its type is datetime64"),
        ([None], "its type is object"),
    ],
)
def test_an_invalid_vector_is_rejected_with_its_description(vector: Any, words: str) -> None:
    with SearchClient([], "test") as client, pytest.raises(InvalidRequest, match=words) as refused:
        client.search(vector)
    assert refused.value.param == "vector"


@pytest.mark.parametrize("node", [None, 3, b"my-node"])
def test_an_invalid_node_name_is_rejected(node: Any) -> None:
    with pytest.raises(InvalidRequest, match="node must be a name") as refused:
        SearchClient.connect(node)
    assert refused.value.param == "node"
