"""An engine as compiled loops call it: C functions by their addresses, and one handle that they all take first.

All arguments and results are int64; addresses are bytes.

    admit(handle, vector, collection, k, top_m, width, patience)
        Give the float32 at `vector` a slot, which is returned; INVALID for a vector that cannot be searched or a
        collection that is not there. There must be a free slot, and the parameters be within the engine's limits.
    extend(handle, report)
        Advance every running slot. Returns how many are done: report[0] extends were made, over report[1] slots more
        than are running, and from report[2] on stand pairs: a slot that is done, oldest first, and its extends.
    harvest(handle, slot, ids, distances)
        Write a done slot's ids (int64) and distances (float32), nearest first. Returns how many there are.
    change(handle, slot, what)
        PAUSE, RESUME or RELEASE a slot, as `Engine` has it.
    restrict(handle, slot, allowed, passing)
        Let the query of a slot that was admitted since the last extend find only rows whose bits are set, uint64 words
        at `allowed`, `passing` of them. They must stay until the slot is released.

Below 0 (but for INVALID) each says that the engine has failed; `Backend.check` raises why.
"""

from collections.abc import Callable
from typing import NamedTuple

INVALID, FAILED = -1, -2
PAUSE, RESUME, RELEASE = range(3)


class Backend(NamedTuple):
    """The functions' addresses and the handle. The engine that gave it must outlive it, and may not be used meanwhile
    but for `load` and `unload`. `number` is what `admit` calls a collection; it raises UnknownCollection."""

    admit: int
    extend: int
    harvest: int
    change: int
    handle: int
    number: Callable[[str], int]
    restrict: int
    check: Callable[[], None] = lambda: None
