"""Functions are compiled also where their machine code cannot be kept."""

from typing import Any

from ipc.memory.compiled import can_cache, compiled, entry_point


def without_a_place(source: str, name: str) -> Any:
    """A function for whose machine code numba finds no place, as for a user without a writable directory."""
    names: dict[str, Any] = {}
    exec(compile(source, "<nowhere>", "exec"), names)
    return names[name]


def test_what_cannot_be_kept_is_compiled_all_the_same() -> None:
    add = without_a_place("def add(a, b):\n    return a + b\n", "add")
    assert compiled(add)(2, 3) == 5
    assert entry_point("int64(int64, int64)")(add)(2, 3) == 5


def test_here_it_can_be_kept() -> None:
    assert can_cache()
