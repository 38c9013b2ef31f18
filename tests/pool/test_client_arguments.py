"""What a user can hand to `SearchClient` by mistake is refused by name, before anything is sent."""

from typing import Any

import pytest

from runtime import SearchClient
from runtime.errors import InvalidRequest


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"k": 1.5}, "k"),
        ({"k": True}, "k"),
        ({"k": 1, "top_m": "64"}, "top_m"),
        ({"k": 1, "deadline_ms": float("nan")}, "deadline_ms"),
        ({"k": 1, "deadline_ms": 1e30}, "deadline_ms"),
        ({"k": 1, "deadline_ms": 0}, "deadline_ms"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, Any], name: str) -> None:
    with SearchClient([], "test") as client, pytest.raises(InvalidRequest) as refused:
        client.search([0.0], **arguments)
    assert refused.value.param == name
