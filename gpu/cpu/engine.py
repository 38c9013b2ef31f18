"""The CPU engine: a running batch advanced one extend at a time."""

from collections.abc import Callable, Mapping

from gpu.cpu import backend
from gpu.cpu.state import BatchState
from gpu.engine import Backend, Engine
from gpu.index.graph_index import GraphIndex
from gpu.slots import Limits, SlotTable


class CpuEngine(Engine):
    """An engine over indexes in host memory.

    collections: the indexes by name. slots: size of the running batch, 1..4096. max_top_m, max_k, max_search_width:
    limits of a query's parameters. All memory is allocated in the constructor (see `BatchState`). Raises
    InvalidParams.
    """

    def __init__(
        self,
        collections: Mapping[str, GraphIndex],
        *,
        slots: int = 32,
        max_top_m: int = 512,
        max_k: int | None = None,
        max_search_width: int = 8,
    ) -> None:
        super().__init__(collections, Limits.of(slots, max_top_m, max_k, max_search_width))
        self._state = self._new_state()
        self._handle = backend.Handle()
        # In the order in which they are compiled: meanwhile other processes compile what the last ones call.
        order = (backend.read_result, backend.change_state, backend.set_filter, backend.admit, backend.extend)
        read_result, change_state, set_filter, admit, extend = (function.address for function in order)
        functions = Backend(
            admit, extend, read_result, change_state,
            self._handle.address, self._collections.number, set_filter,
        )  # fmt: skip
        self._start(functions, SlotTable(slots))
        self._point_handle()

    def _point_handle(self) -> None:
        ids = [None if data is None else data.ids for data in self._collections.data]
        self._handle.point_to(self._state.handle, self._slots, ids)

    def load(self, collection: str, index: GraphIndex) -> None:
        """See `Engine.load`. Reallocates the slots' state if the index needs larger arrays."""
        self._collections.add(collection, index)
        self._renew_state()

    def load_part(self, collection: str, index: GraphIndex) -> bool:
        """See `Engine.load_part`. Completes at once: nothing is copied."""
        self.load(collection, index)
        return True

    def unload(self, collection: str) -> bool:
        """See `Engine.unload`."""
        number, slots = self._collections.number(collection), self._state.batch.slots
        if any(slots[slot].collection == number for slot in self._slots.taken):
            return False
        self._collections.remove(collection)
        self._renew_state()
        return True

    def _new_state(self) -> BatchState:
        limits = self.limits
        return BatchState(self._collections.data, limits.slots, limits.max_top_m, limits.max_search_width, limits.max_k)

    def _renew_state(self) -> None:
        old, self._state = self._state, self._new_state()
        self._state.migrate_from(old, self._slots.taken, self._slots.active_count)
        self._point_handle()

    def interrupt_when(self, arrived: Callable[[], bool]) -> None:
        """See `Engine.interrupt_when`. No effect: a call of `extend` makes one extend."""

    def extends(self, slot: int) -> int:
        """See `Engine.extends`. Raises InvalidSlot for a free slot."""
        self._slots.expect_taken(slot)
        return self._state.batch.slots[slot].extends

    def _requested_k(self, slot: int) -> int:
        return self._state.batch.slots[slot].k

    def _check_open(self) -> None:
        """Do nothing: a CPU engine needs no closing."""

    def close(self) -> None:
        """See `Engine.close`. Memory is freed with the last reference."""
