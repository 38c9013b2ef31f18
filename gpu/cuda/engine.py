"""The engine on a CUDA device: a running batch that captured graphs advance, and results that are read by looking."""

import contextlib
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from gpu.backend import Backend
from gpu.callbacks import Callbacks
from gpu.cpu.queries import Form as QueryForm
from gpu.cpu.queries import checked, refusal, write_query
from gpu.cuda import layout
from gpu.cuda.batch import BatchMemory
from gpu.cuda.driver import Driver
from gpu.cuda.graphs import Form, Kernels, LaunchGraphs, buckets_of
from gpu.cuda.upload import Progress
from gpu.errors import DeviceError, InvalidParams
from gpu.index import GraphIndex
from gpu.params import SearchParams
from gpu.rows import true_distances
from gpu.slots import Collections, Limits, SlotState, SlotTable

MAX_EXTENDS_PER_LAUNCH = 1024
_REMEMBERED = 1024  # sets of parameters that need not be checked again
_FAULT_LOOK_NS = 10_000_000  # a launch that takes longer has the driver asked whether it failed
_GIVE_UP_NS = 30_000_000_000
_WORD = 0xFFFFFFFF


class CudaEngine:
    """The `Engine` interface over indexes in a device's memory; limits as in `CpuEngine`.

    A step is: the commands that admissions, pauses and releases have left in pinned memory, as one launch; one replay
    of the graph of the smallest bucket that covers the active slots; looking at a pinned word until it has ended.
    Nothing is captured after the constructor, and no step synchronises.

    extends_per_launch: up to so many extends in one launch, which ends early when a slot is done, or when what was
    given to `interrupt_when` rings the doorbell. form: see `gpu.cuda.graphs`.
    """

    def __init__(
        self,
        driver: Driver,
        image: bytes,
        collections: Mapping[str, GraphIndex],
        *,
        slots: int = 32,
        max_top_m: int = 512,
        max_k: int | None = None,
        max_search_width: int = 8,
        extends_per_launch: int = 1,
        form: Form | None = None,
        progress: Progress | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """image: the kernels, compiled for the device. progress: called with what is copied and the part that is done.

        Raises InvalidParams, OutOfDeviceMemory, DeviceError. The driver stays the caller's to close.
        """
        if not 1 <= extends_per_launch <= MAX_EXTENDS_PER_LAUNCH:
            raise InvalidParams(f"extends_per_launch is {extends_per_launch}, outside 1..{MAX_EXTENDS_PER_LAUNCH}")
        self._collections = Collections(collections)
        self.limits = Limits.of(slots, max_top_m, max_k, max_search_width)
        data = self._collections.loaded
        self._shape = shape = layout.BatchShape.of(data, slots, max_top_m, self.limits.max_k, max_search_width)
        self._driver, self._clock_ns = driver, clock_ns
        self._forms = dict(enumerate(QueryForm(layout.without_sketch(one.rows)) for one in data))
        self._heads: dict[tuple[int, SearchParams], npt.NDArray[np.uint8]] = {}
        self._slots = SlotTable(slots, np.zeros(slots, np.int32))
        self._asked = np.zeros(slots, np.uint32)  # the ticket of each slot's query
        self._ks = [0] * slots
        self._numbers = [0] * slots
        self._next_ticket = 1
        self._pending: dict[int, int] = {}  # slot → its command
        self._launches = 0
        self._hangs = False  # a launch has not ended in time, and never may
        self._own_driver = False
        self.waited_ns = 0
        self.extends_made = 0
        self.padded_slots = 0
        self._extends_in_all = 0
        self._arrived: Callable[[], bool] | None = None
        self._stream = driver.create_stream()
        self._memory: BatchMemory | None = None
        self._graphs: LaunchGraphs | None = None
        try:
            named = dict(zip(collections, data, strict=True))
            self._memory = memory = BatchMemory(driver, self._stream, named, shape, progress)
            batch = layout.argument(memory.record)
            self._kernels = Kernels(driver, image, shape, layout.team_of(data), batch)
            wanted: Form = form or ("plain" if extends_per_launch == 1 else "loop")
            buckets = buckets_of(slots)
            self._graphs = LaunchGraphs(driver, self._stream, self._kernels, buckets, wanted, extends_per_launch)
            for bucket in buckets:  # with no slot active: what a first launch takes longer belongs to the start
                self._launch(bucket)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        device: str,
        collections: Mapping[str, GraphIndex],
        *,
        slots: int = 32,
        max_top_m: int = 512,
        max_k: int | None = None,
        max_search_width: int = 8,
        extends_per_launch: int = 1,
        form: Form | None = None,
        progress: Progress | None = None,
    ) -> "CudaEngine":
        """An engine on "cuda:N" or on the GPU of a UUID, its kernels compiled (once a machine) for it.

        Raises DeviceUnavailable beside what the constructor raises.
        """
        from gpu.cuda.compiler import compile_kernels
        from gpu.cuda.cuda_driver import CudaDriver

        driver = CudaDriver(device)
        try:
            engine = cls(
                driver,
                compile_kernels(driver.arch),
                collections,
                slots=slots,
                max_top_m=max_top_m,
                max_k=max_k,
                max_search_width=max_search_width,
                extends_per_launch=extends_per_launch,
                form=form,
                progress=progress,
            )
        except BaseException:
            driver.close()
            raise
        engine._own_driver = True
        return engine

    @property
    def free_slots(self) -> int:
        return self._slots.free_count

    @property
    def active_slots(self) -> int:
        return self._slots.active_count

    @property
    def dims(self) -> Mapping[str, int]:
        return self._collections.dims

    @property
    def form(self) -> Form:
        """How launches are made: what was wanted, or "plain" where the device cannot."""
        assert self._graphs is not None
        return self._graphs.form

    @property
    def refused(self) -> str:
        """Why the device cannot launch in the form that was wanted; empty if it can."""
        assert self._graphs is not None
        return self._graphs.refused

    @property
    def extends_per_launch(self) -> int:
        """The most extends of a launch: what was wanted, or 1 where the device cannot."""
        assert self._graphs is not None
        return self._graphs.limit

    def backend(self) -> Backend:
        """See `Engine.backend`. Python's functions, called back."""
        self._callbacks = Callbacks(self, self._collections)
        return self._callbacks.backend()

    def load(self, collection: str, index: GraphIndex) -> None:
        """See `Engine.load`. The loop stands still while it is copied to the device.

        Raises OutOfDeviceMemory, and InvalidParams for an index whose queries need more than those of the indexes that
        the engine was made with: sizes are captured in its graphs.
        """
        number, data, limits = self._collections.next_number(collection), index.data, self.limits
        wanted = layout.BatchShape.of([data], limits.slots, limits.max_top_m, limits.max_k, limits.max_search_width)
        if not self._shape.covers(wanted):
            raise InvalidParams(
                f"collection {collection!r} has longer vectors, a larger degree or more seeds than this engine has "
                f"room for: it can be loaded when the engine starts (needed {wanted}, there is {self._shape})"
            )
        self._open().load(number, collection, data)
        self._forms[number] = QueryForm(layout.without_sketch(data.rows))
        self._collections.add(collection, index)

    def unload(self, collection: str) -> bool:
        """See `Engine.unload`."""
        number = self._collections.number(collection)
        if any(self._numbers[slot] == number for slot in self._slots.taken):
            return False
        self._open().unload(number)
        self._collections.remove(collection)
        del self._forms[number]
        self._heads = {head: line for head, line in self._heads.items() if head[0] != number}
        return True

    def admit(self, query: npt.ArrayLike, params: SearchParams, collection: str) -> int:
        """See `Engine.admit`."""
        number = self._collections.number(collection)
        head = self._heads.get((number, params))
        if head is None:
            head = self._new_head(number, params)
        form = self._forms[number]
        vector = np.asarray(query)
        if vector.dtype != np.float32 or vector.shape != (form.dim,) or not vector.flags.c_contiguous:
            vector = checked(vector[None], form.dim)[0]
        slot, memory = self._slots.next_free(), self._open()
        line = memory.lines[slot]
        if not write_query(vector, form.line, line[layout.SLOT.itemsize :]):
            raise refusal(vector, 0)
        line[: layout.SLOT.itemsize] = head
        line[_TICKET].view(np.uint32)[0] = self._next_ticket
        self._asked[slot] = self._next_ticket
        self._next_ticket = self._next_ticket % _WORD + 1
        self._ks[slot], self._numbers[slot] = params.k, number
        memory.results["extends"][slot] = 0  # no launch runs that could write it
        self._command(slot, layout.ACTIVE, int(memory.line_addresses[slot]))
        return self._slots.take()

    def extend(self) -> npt.NDArray[np.int32]:
        """See `Engine.extend`; with `extends_per_launch` above 1, as many as a launch takes until a slot is done."""
        count = self._slots.active_count
        if not count:
            return np.empty(0, np.int32)
        memory, graphs = self._open(), self._graphs
        assert graphs is not None
        if self._pending:
            self._kernels.write_slots(self._stream, memory.commands_address, len(self._pending))
            self._pending.clear()
        active = self._slots.active[:count]
        bucket = graphs.bucket_for(int(active.max()) + 1)
        self.padded_slots = bucket - count
        self._launch(bucket)
        done = memory.results["ticket"][active] == self._asked[active]
        return self._slots.finish_where(done)

    def interrupt_when(self, arrived: Callable[[], bool]) -> None:
        """See `Engine.interrupt_when`."""
        self._arrived = arrived

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """See `Engine.result`. Raises InvalidSlot unless the slot is finished."""
        self._slots.expect(slot, SlotState.FINISHED)
        memory, k = self._open(), self._ks[slot]
        data = self._collections.at(self._numbers[slot])
        nodes = memory.nodes[slot, :k].astype(np.int64)
        return data.ids_of(nodes), true_distances(memory.raw[slot, :k].copy(), data.rows)

    def release(self, slot: int) -> None:
        """See `Engine.release`. Raises InvalidSlot for a free slot."""
        self._slots.release(slot)
        self._command(slot, layout.FREE)

    def pause(self, slot: int) -> None:
        """See `Engine.pause`. Raises InvalidSlot unless the slot is running."""
        self._slots.pause(slot)
        self._command(slot, layout.PAUSED)

    def resume(self, slot: int) -> None:
        """See `Engine.resume`. Raises InvalidSlot unless the slot is paused."""
        self._slots.resume(slot)
        self._command(slot, layout.ACTIVE)

    def extends(self, slot: int) -> int:
        """See `Engine.extends`. Raises InvalidSlot for a free slot."""
        self._slots.expect_taken(slot)
        return int(self._open().results["extends"][slot])

    def close(self) -> None:
        """See `Engine.close`. A driver that `open` made is closed too."""
        if self._stream:
            stream, self._stream = self._stream, 0
            if self._hangs:  # waiting for it, or freeing what it uses, would hang too: the process's end frees it
                return
            with contextlib.suppress(DeviceError):  # a launch that failed must not keep the memory
                self._driver.synchronise(stream)
            if self._graphs is not None:
                self._graphs.close()
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            self._driver.destroy_stream(stream)
            if self._own_driver:
                self._driver.close()

    # ---- commands

    def _command(self, slot: int, status: int, line: int = 0) -> None:
        """Leave a command for the next launch. A slot has one at most: a later one overwrites what the earlier said."""
        commands = self._open().commands
        place = self._pending.get(slot)
        if place is None:
            self._pending[slot] = len(self._pending)
            commands[len(self._pending) - 1] = (slot, status, line)
            return
        commands["status"][place] = status
        if line:
            commands["line"][place] = line

    def _new_head(self, number: int, params: SearchParams) -> npt.NDArray[np.uint8]:
        self.limits.check(params)
        degree = int(self._collections.at(number).graph.shape[1])
        head: npt.NDArray[np.uint8] = layout.slot_head(number, degree, params, 0).view(np.uint8)
        if len(self._heads) >= _REMEMBERED:
            self._heads.clear()
        self._heads[number, params] = head
        return head

    # ---- launches

    def _launch(self, bucket: int) -> None:
        """Replay, and look at the pinned word until the launch has ended."""
        memory, graphs = self._open(), self._graphs
        assert graphs is not None
        graphs.replay(bucket)
        self._launches = wanted = (self._launches + 1) & _WORD
        words, arrived = memory.progress, self._arrived
        begin = self._clock_ns()
        look_at = begin + _FAULT_LOOK_NS
        # SYNC POINT: progress. The kernel stores it last, with release; on x86-64 any load acquires.
        while words[0] != wanted:
            if arrived is not None and graphs.limit > 1 and not memory.doorbell[0] and arrived():
                memory.doorbell[0] = 1
            now = self._clock_ns()
            if now >= look_at:
                look_at = now + _FAULT_LOOK_NS
                self._look_for_faults(wanted, now - begin)
        memory.doorbell[0] = 0
        self.extends_made = (words[1] - self._extends_in_all) & _WORD
        self._extends_in_all = words[1]
        self.waited_ns += self._clock_ns() - begin

    def _look_for_faults(self, wanted: int, waited_ns: int) -> None:
        """Raise DeviceError if the launch failed, ended without a word, or takes for ever."""
        words = self._open().progress
        if self._driver.idle(self._stream) and words[0] != wanted:
            raise DeviceError(f"launch {wanted} ended, but only {words[0]} launches are reported")
        if waited_ns > _GIVE_UP_NS:
            self._hangs = True
            raise DeviceError(f"launch {wanted} has not ended within {_GIVE_UP_NS // 10**9} s")

    def _open(self) -> BatchMemory:
        if self._memory is None:
            raise DeviceError("the engine was closed")
        return self._memory


_TICKET = slice(layout.SLOT.fields["ticket"][1], layout.SLOT.fields["ticket"][1] + 4)  # type: ignore[index]
