"""The interface of the search engine's backends."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gpu.backend import Backend
from gpu.index import GraphIndex
from gpu.params import SearchParams


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
