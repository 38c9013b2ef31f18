"""What an engine is: `Engine`, its interface in Python, and `Backend`, the same for compiled loops."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gpu.index.graph_index import GraphIndex
from gpu.params import SearchParams

INVALID, FAILED = -1, -2
PAUSE, RESUME, RELEASE = range(3)


class Backend(NamedTuple):
    """An engine as compiled loops call it: C functions by their addresses, and one handle that they all take first.

    All arguments and results are int64; addresses are bytes.

        admit(handle, vector, collection, k, top_m, width, patience)
            Give the float32 at `vector` a slot, which is returned; INVALID for a vector that cannot be searched or a
            collection that is not there. There must be a free slot, and the parameters be within the engine's limits.
        extend(handle, report)
            Advance every running slot. Returns how many are done: report[0] extends were made, over report[1] slots
            more than are running, and from report[2] on stand pairs: a slot that is done, oldest first, and its
            extends. Where slots go on by themselves, it returns when one is done, or with none; an extend was made
            when slots have together made as many as are running, and may be none yet.
        harvest(handle, slot, ids, distances)
            Write a done slot's ids (int64) and distances (float32), nearest first. Returns how many there are.
        change(handle, slot, what)
            PAUSE, RESUME or RELEASE a slot, as `Engine` has it.
        restrict(handle, slot, allowed, passing)
            Let the query of a slot that was admitted since the last extend find only rows whose bits are set, uint64
            words at `allowed`, `passing` of them. They must stay until the slot is released.
        hurry(handle, slot)
            Have the query of a slot that was admitted since the last extend begun before others that do not hurry. 0
            where every slot is advanced at once.

    Below 0 (but for INVALID) each says that the engine has failed; `Backend.check` raises why.

    The engine that gave it must outlive it, and may not be used meanwhile but for `load`, `load_part` and `unload`.
    `number` is what `admit` calls a collection; it raises UnknownCollection.
    """

    admit: int
    extend: int
    harvest: int
    change: int
    handle: int
    number: Callable[[str], int]
    restrict: int
    check: Callable[[], None] = lambda: None
    hurry: int = 0


class Engine(Protocol):
    """A fixed number of slots, all advanced by one extend at a time.

    A slot goes `admit` → (`extend` …, `pause`, `resume`) → finished → `result` → `release`; `release` also cancels.
    An engine belongs to one thread.
    """

    @property
    def free_slots(self) -> int:
        """Slots that `admit` could fill now."""

    @property
    def active_slots(self) -> int:
        """Slots that the next `extend` advances: admitted, neither paused nor finished."""

    @property
    def dims(self) -> Mapping[str, int]:
        """The vector length of each collection."""

    def backend(self) -> Backend:
        """What a compiled loop calls instead of the methods below; see `Backend` for what may be called beside it."""

    def load(self, collection: str, index: GraphIndex) -> None:
        """Search one more index from now on, under a name of its own; queries in their slots go on.

        Raises InvalidParams for a name that is taken, and what the backend raises for an index that does not fit.
        """

    def load_part(self, collection: str, index: GraphIndex) -> bool:
        """A part of `load`, for a loop that is not to stand still: whether it is done. Ask again, between two extends,
        until it is, or `unload` what is not wanted any more. Raises as `load`."""

    def unload(self, collection: str) -> bool:
        """Forget an index, once no slot searches it: False, and nothing is done, until then. Raises UnknownCollection.

        Replacing an index is to load the new one under a new name, to admit under that, and to unload the old one.
        """

    def admit(self, query: npt.ArrayLike, params: SearchParams, collection: str) -> int:
        """Give `query` (float32 [d]) a slot and return it.

        Raises NoFreeSlot, InvalidVector (wrong length, NaN, infinity), UnknownCollection or InvalidParams.
        """

    def extend(self) -> npt.NDArray[np.int32]:
        """Advance every active slot by one extend and return the slots that this finished, in admission order.

        A backend may be made to do several extends at once; it stops at the first that finishes a slot.
        """

    @property
    def extends_made(self) -> int:
        """How many extends the last `extend` made: 1, unless the backend makes several in one launch."""

    @property
    def padded_slots(self) -> int:
        """Slots beyond the active ones that the last `extend` covered: launches may have fixed sizes."""

    def interrupt_when(self, arrived: Callable[[], bool]) -> None:
        """Let an `extend` that makes several end with the one at hand when `arrived`, asked meanwhile, is True."""

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ids and distances (both [k], nearest first) of a finished slot; missing ones are -1 and +inf."""

    def release(self, slot: int) -> None:
        """Free a slot in any state, and forget its query."""

    def pause(self, slot: int) -> None:
        """Keep a running slot's state but leave it out of `extend`."""

    def resume(self, slot: int) -> None:
        """Take a paused slot into `extend` again; it goes on where it stopped."""

    def extends(self, slot: int) -> int:
        """How many extends the slot's query has taken so far."""

    def close(self) -> None:
        """Give memory and device back; the engine is of no use afterwards. Idempotent."""
