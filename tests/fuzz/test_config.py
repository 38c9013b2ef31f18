"""Fuzz tests of configuration files: each is valid or raises a `ConfigError` that names the key."""

import math
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.node.config import NodeConfig, parse_config
from runtime.node.config_file import load_config
from runtime.node.placement.layout import lay_out
from tests.fuzz.budget import fuzzed
from tests.fuzz.toml import TEXT, values, written

SECTIONS = {name: kind for name, kind in get_type_hints(NodeConfig).items() if name not in ("model", "collections")}
KEYS = sorted({*get_type_hints(NodeConfig), *(key for kind in SECTIONS.values() for key in get_type_hints(kind))})
NAMES = st.sampled_from([*KEYS, "name", "path", "context_tokens", "shards"]) | TEXT
VALUES = values(NAMES)


def full() -> dict[str, Any]:
    """Return every key with its default."""
    made: dict[str, Any] = msgspec.to_builtins(NodeConfig())
    made["model"] = {"name": "smollm2-135m-instruct", "context_tokens": 2048}
    made["collections"] = [{"name": "docs", "path": ".", "shards": 1}]
    return made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value of a table."""
    if path:
        yield path
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


FULL = full()
PLACES = list(places(FULL))


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the full configuration with another value at a path."""
    table = full()
    inner: Any = table
    for key in path[:-1]:
        inner[key] = list(inner[key]) if isinstance(inner[key], tuple) else inner[key]
        inner = inner[key]
    inner[path[-1]] = value
    return table


def dotted(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def test_the_full_configuration_is_valid() -> None:
    assert parse_config(full()).collections[0].name == "docs"


@fuzzed()
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_table_is_valid_or_an_error_that_names_one_of_its_keys(table: dict[str, Any]) -> None:
    refusal = refused(lambda: parse_config(table))
    assert refusal is None or refusal.startswith((*table, *map(repr, table)))


@fuzzed()
@given(st.sampled_from(PLACES), VALUES)
def test_a_wrong_value_is_rejected_with_its_key(path: tuple[Any, ...], value: Any) -> None:
    refusal = refused(lambda: lay_out(parse_config(changed(path, value))))
    # A contradiction with another key of the section may be reported under that key's name.
    assert refusal is None or refusal.startswith(dotted(path)) or any(str(part) in refusal for part in path)


@fuzzed()
@given(st.sampled_from([path[:-1] for path in PLACES]), NAMES.filter(lambda key: key not in KEYS), VALUES)
def test_an_unknown_key_is_rejected_with_its_name(path: tuple[Any, ...], key: str, value: Any) -> None:
    table: Any = full()
    inner = table
    for step in path:
        inner = inner[step]
    if not isinstance(inner, dict) or key in inner:
        return
    inner[key] = value
    with pytest.raises(ConfigError) as caught:
        parse_config(table)
    written_so = [f"{dotted(path)}.{shown}: unknown key".removeprefix(".") for shown in (key, repr(key))]
    assert caught.value.message.startswith(tuple(written_so)), caught.value.message


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "node.toml"


@fuzzed()
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_valid_or_an_error_that_names_the_file(path: Path, content: bytes) -> None:
    loads(path, content)


@fuzzed()
@given(table=st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_toml_is_valid_or_an_error_that_names_the_file(path: Path, table: dict[str, Any]) -> None:
    text = written(table)
    read = tomllib.loads(text)
    assert read == table or any(math.isnan(value) for value in leaves(read) if isinstance(value, float))
    loads(path, text.encode())


@fuzzed()
@given(where=st.integers(0, 10_000), cut=st.integers(0, 40), put=st.binary(max_size=40))
def test_a_damaged_file_is_valid_or_an_error_that_names_the_file(path: Path, where: int, cut: int, put: bytes) -> None:
    whole = written(FULL).encode()
    where %= len(whole)
    loads(path, whole[:where] + put + whole[where + cut :])


HOSTILE = {
    "a number of 5,000 digits": b"http.port = " + b"9" * 5000,
    "arrays within arrays": b"pool.cores = " + b"[" * 5000,
    "tables within tables": b"pool = " + b"{a=" * 5000,
    "a key of many parts": b".".join([b"a"] * 5000) + b" = 1",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_input_that_exhausts_the_parser_is_rejected(path: Path, case: str) -> None:
    path.write_bytes(HOSTILE[case])
    with pytest.raises(ConfigError, match=r"node\.toml: "):
        load_config(path)


def loads(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    refusal = refused(lambda: load_config(path))
    assert refusal is None or refusal.startswith(f"{path}: ")


def refused(act: Callable[[], object]) -> str | None:
    """Return the message of the ConfigError, or None."""
    try:
        act()
    except ConfigError as error:
        return error.message
    return None


def leaves(value: Any) -> Iterator[Any]:
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from leaves(inner)
    yield value
