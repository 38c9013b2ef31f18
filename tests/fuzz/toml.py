"""Strategies for TOML values, and a TOML writer."""

import datetime
import json
from typing import Any

from hypothesis import strategies as st

_ZONES = st.none() | st.just(datetime.UTC)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALAR = (
    st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | TEXT
    | st.datetimes(timezones=_ZONES)
    | st.dates()
    | st.times()
)


def values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Draw any value that a TOML file can hold under a key."""
    return st.recursive(
        SCALAR,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=8,
    )


def written(table: dict[str, Any]) -> str:
    """Return the table as a TOML document with inline nested tables."""
    return "".join(f"{_string(key)} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            return f"{{{', '.join(f'{_string(key)} = {_value(inner)}' for key, inner in value.items())}}}"
        case _:
            return str(value.isoformat())


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
