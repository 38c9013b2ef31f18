"""Tests that functions are compiled even if their machine code cannot be cached."""

from typing import Any

from numba import njit, types

from ipc.native.compiled import EntryPoints, can_cache, compiled


def without_a_place(source: str, name: str) -> Any:
    """Return a function for which numba finds no cache directory, as for a user without a writable directory."""
    names: dict[str, Any] = {}
    exec(compile(source, "<nowhere>", "exec"), names)
    return names[name]


def test_code_is_compiled_without_a_cache_directory() -> None:
    add = without_a_place("def add(a, b):\n    return a + b\n", "add")
    assert compiled(add)(2, 3) == 5
    names: dict[str, Any] = {}
    entry_point = EntryPoints(names)
    entry_point("int64(int64, int64)")(add)
    entry_point.compile()
    assert names["add"](2, 3) == 5


def test_functions_that_others_compile_in_this_process_have_numbas_own_compiler() -> None:
    add = without_a_place("def add(a, b):\n    return a + b\n", "add")
    assert compiled(add)(2, 3) == 5
    assert types.Function.get_call_type.__module__ == types.Function.__module__
    assert njit(add)(2, 3) == 5


def test_machine_code_can_be_cached_here() -> None:
    assert can_cache()
