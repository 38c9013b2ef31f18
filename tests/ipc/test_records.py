"""Records: one declaration for Python, numpy and compiled code."""

import gc
import weakref
from typing import Annotated, Any

import numpy as np
from numba import njit

from ipc.native.compiled import compiled
from ipc.native.records import (
    U8,
    U32,
    Array,
    Record,
    Shared,
    address_of,
    array_over,
    copy_of,
    new_array,
    numpy_view,
    offset_of,
    record,
    record_at,
    sizeof,
)


@record
class Item(Record):
    number: int
    small: U32
    marked: bool
    ratio: float


@record
class Box(Record):
    count: int
    items: Array[Item]
    counts: Annotated[Array[int], 3]
    lists: Annotated[Array[Array[int]], 2]
    last: Item
    turn: Shared


@record
class Packed(Record):
    byte: U8
    wide: U32
    word: int


_box_at = record_at(Box)


def _fill(box: Box, count: int) -> int:
    total = 0
    for i in range(count):
        item = box.items[i]
        total += item.number + item.small
        item.marked = not item.marked
        item.ratio += 0.5
        box.counts[i % 3] += i
        box.lists[1][i] = item.small
        box.count += 1
    box.last.number = total if box.items else -1
    box.turn += 1
    return total


_fill_compiled = compiled(_fill)


@compiled
def _fill_at(at: int, count: int) -> int:
    return _fill_compiled(_box_at(at), count)


def filled() -> tuple[Box, Any]:
    box, numbers = Box(count=7, items=new_array(Item, 5)), np.zeros(5, np.int64)
    for i in range(5):
        box.items[i].number, box.items[i].small = i, 65535
    box.lists[1] = array_over(int, numbers)
    return box, numbers


def test_a_compiled_function_and_python_do_the_same_to_a_record() -> None:
    (expected, expected_numbers), (found, found_numbers) = filled(), filled()
    assert _fill(expected, 5) == _fill_at(address_of(found), 5) == 5 * 65535 + 10
    assert found_numbers.tolist() == expected_numbers.tolist() == [65535] * 5
    for box in (expected, found):
        assert (box.count, box.turn, box.last.number) == (12, 1, 5 * 65535 + 10)
        assert numpy_view(box.counts, 3).tolist() == [3, 5, 2]
        assert numpy_view(box.items, 5)["ratio"].tolist() == [0.5] * 5
        assert numpy_view(box.items, 5)["marked"].all()


def test_fields_are_aligned_as_in_c_and_numpy_knows_their_offsets() -> None:
    assert [offset_of(Packed, name) for name in ("byte", "wide", "word")] == [0, 4, 8]
    assert sizeof(Packed) == Packed.dtype.itemsize == 16
    assert Box.dtype["last"] == Item.dtype
    assert Box.dtype["counts"].shape == (3,)


def test_a_record_keeps_the_arrays_that_were_assigned_to_it() -> None:
    box, numbers = filled()
    kept = weakref.ref(numbers)
    del numbers
    gc.collect()
    assert [box.items[i].number for i in range(5)] == list(range(5))
    assert kept() is not None
    box.lists[1] = new_array(int, 1)
    gc.collect()
    assert kept() is None


def test_a_copy_is_independent() -> None:
    packed = Packed(byte=1, wide=2, word=3)
    copied = copy_of(packed)
    packed.word = 4
    assert (copied.byte, copied.wide, copied.word) == (1, 2, 3)


def test_a_fresh_array_is_zeroed_and_an_unset_one_is_none() -> None:
    box = Box()
    assert not box.items
    assert _fill_at(address_of(box), 0) == 0
    assert box.last.number == -1
    assert bytes(numpy_view(new_array(Item, 3), 3)) == bytes(3 * sizeof(Item))


def test_machine_code_counts_no_references_and_a_shared_word_is_ordered() -> None:
    def fill(at: int) -> int:
        return _fill_compiled(_box_at(at), 5)

    made = njit(_nrt=False)(fill)
    made.compile("int64(int64)")
    (assembly,), (code,) = made.inspect_asm().values(), made.inspect_llvm().values()
    assert "NRT_" not in assembly
    assert "load atomic i64" in code
    assert "store atomic i64" in code
