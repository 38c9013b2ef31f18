"""Tests of pools that read vectors where they lie in the arena, in an emulated device's memory."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu import GraphIndex
from gpu.cuda.engine import CudaEngine
from gpu.cuda.graphs import LaunchForm
from ipc import MemoryRefused, RingClient, SearchSpec
from ipc.memory.device import CudaReference, DeviceSpan
from ipc.native import atomics
from ipc.session.device_arena import DeviceArena, arena_bytes
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.worker import Worker
from runtime.pool import process
from runtime.testing.pool import InProcessPool, plan_of
from tests.cuda.conftest import NewDriver
from tests.cuda.conftest import new_driver as new_driver
from tests.cuda.emulation import LOOK_NS, EmulatedDriver
from tests.ipc.arenas import clients_on, make_arena, span
from tests.ipc.fake_cuda import FakeCuda
from tests.pool.client_helpers import Vectors
from tests.pool.conftest import MakePool
from tests.pool.test_process import collect
from tests.pool.written_collection import WrittenCollection

_CLIENTS = 64  # clients of a pool, which divide its arena's slots
_SLOTS = 16  # of each
SPEC = SearchSpec("docs", 5, top_m=32, search_width=2)


class EmulatedMemory:
    """`DeviceMemory` of an emulated device, for both ends of an arena. A client's vectors are in host memory."""

    def __init__(self, driver: EmulatedDriver, size: int) -> None:
        self._driver, self.size, self._stream = driver, size, driver.create_stream()
        self.address = driver.allocate(size)
        self.reads = 0
        self.held_back: list[Callable[[], None]] | None = None
        """Copies that the client's device has not made yet; None: it makes them at once."""

    @property
    def reference(self) -> CudaReference:
        return CudaReference(1, "cuda:0", bytes(64), self.size)

    def write(self, offset: int, source: npt.NDArray[Any]) -> None:
        self._driver.copy_to_device(self._stream, self.address + offset, np.ascontiguousarray(source))

    def send(self, offset: int, source: DeviceSpan, word: int, value: int) -> None:
        def sent() -> None:
            self.write(offset, np.frombuffer(ctypes.string_at(source.address, source.nbytes), np.uint8))
            self.flush()
            atomics.store_release(word, value)

        if self.held_back is None:
            sent()
        else:
            self.held_back.append(sent)

    def read(self, offset: int, target: npt.NDArray[Any]) -> None:
        self.reads += 1
        self._driver.copy_to_host(self._stream, target, self.address + offset)

    def reach(self, address: int, nbytes: int) -> int:
        return address

    def flush(self) -> None:
        self._driver.synchronise(self._stream)

    def idle(self) -> bool:
        return True

    def close(self) -> None: ...  # the device is closed as a whole


def in_place(client: RingClient, vector: Vectors) -> int:
    """Submit a vector in the client's GPU's memory."""
    return client.submit(DeviceSpan(vector.ctypes.data, vector.nbytes), SPEC)


@pytest.fixture(params=[8, "resident"])
def memories(
    request: pytest.FixtureRequest, new_driver: NewDriver, monkeypatch: pytest.MonkeyPatch
) -> list[EmulatedMemory]:
    """Pools search on an emulated device, by launches or the resident kernel, and have an arena in its memory."""
    driver, made = new_driver(), list[EmulatedMemory]()

    def open_engine(device: str, collections: Any, *, resident: bool, **limits: Any) -> CudaEngine:
        form: LaunchForm | None = "resident" if request.param == "resident" else None
        limits |= {"extends_per_launch": 1024 if form else request.param, "max_top_m": 64, "fault_poll_ns": LOOK_NS}
        return CudaEngine(driver, b"", collections, form=form, **limits)

    def arena_of(worker: Worker, dim: int) -> DeviceArena:
        made.append(EmulatedMemory(driver, arena_bytes(_CLIENTS * _SLOTS, 4 * dim)))
        return DeviceArena(made[-1], _CLIENTS * _SLOTS, 4 * dim, worker.epoch)

    monkeypatch.setattr(process, "open_engine", open_engine)
    monkeypatch.setattr(process, "arena_of", arena_of)
    monkeypatch.setattr("ipc.client.arena.open_memory", lambda *_: made[0])
    return made


@pytest.fixture
def pool(memories: list[EmulatedMemory], make_pool: MakePool) -> InProcessPool:
    return make_pool(slots=4, max_k=32, top_m=32)


def test_vectors_in_a_devices_memory_get_the_indexs_answers_and_never_come_to_the_host(
    pool: InProcessPool, memories: list[EmulatedMemory], index: GraphIndex, queries: Vectors
) -> None:
    vectors = queries[:12]
    with pool.attach(arena=True) as client:
        numbers = [client.submit(v, SPEC) if n % 3 == 2 else in_place(client, v) for n, v in enumerate(vectors)]
        found = collect(pool, client, len(vectors))
    scored = GraphIndex(replace(index.data, codes=None))
    ids, _ = scored.search(vectors, 5, top_m=32, search_width=2)
    assert [found[number].ids.tolist() for number in numbers] == ids.tolist()
    assert memories[0].reads == 1, "the client's, of the arena's header"


def test_an_invalid_vector_ends_its_own_query_once_and_no_other(
    pool: InProcessPool, index: GraphIndex, queries: Vectors
) -> None:
    vectors = queries[:6].copy()
    vectors[2, 3], vectors[4, 0] = np.nan, -np.inf
    with pool.attach(arena=True) as client:
        numbers = [in_place(client, one) for one in vectors]
        found = collect(pool, client, len(vectors))
        again = [in_place(client, one) for one in queries[:3]]  # in slots that refused ones have had
        later = collect(pool, client, 3)
    statuses = [found[number].status for number in numbers]
    assert statuses == ["ok", "ok", "invalid_request", "ok", "invalid_request", "ok"]
    assert [len(found[number].ids) for number in numbers] == [5, 5, 0, 5, 0, 5]
    assert {later[number].status for number in again} == {"ok"}
    assert pool.metric(PoolMetrics.QUERIES_REFUSED) == 2


def test_a_vector_that_is_still_being_written_delays_its_client_alone(
    pool: InProcessPool, memories: list[EmulatedMemory], queries: Vectors
) -> None:
    with pool.attach(arena=True) as slow, pool.attach("other", arena=True) as other:
        in_place(slow, queries[0])
        collect(pool, slow, 1)
        held: list[Callable[[], None]] = []
        memories[0].held_back = held
        late = in_place(slow, queries[1])
        memories[0].held_back = None
        for query in queries[2:5]:
            in_place(other, query)
            assert {result.status for result in collect(pool, other, 1).values()} == {"ok"}
        assert slow.poll() == []
        held[0]()
        assert collect(pool, slow, 1)[late].status == "ok"


def test_queries_of_a_client_that_leaves_free_their_slots(
    pool: InProcessPool, memories: list[EmulatedMemory], queries: Vectors
) -> None:
    with pool.attach(arena=True) as client:
        for query in queries[:8]:
            in_place(client, query)
        pool.step()
    with pool.attach(arena=True) as client:
        number = in_place(client, queries[0])
        assert collect(pool, client, 1)[number].status == "ok"
    while pool.engine.free_slots < 4:
        pool.step()


def test_vectors_are_not_read_in_place_after_a_write(harness: WrittenCollection, make_pool: MakePool) -> None:
    """The pool searches on the CPU, and has an arena in the memory of a fake GPU."""
    cuda, slots = FakeCuda(), _CLIENTS * _SLOTS
    harness.upsert("first")
    pool = make_pool(plan_of(harness.path), make_arena=lambda worker, dim: make_arena(cuda, slots, dim, worker.epoch))
    query, wanted = span(harness.held["first"][0]), SearchSpec("docs", 1, top_m=32)
    with clients_on(cuda), pool.attach(arena=True) as client:
        assert client.has_arena
        assert not client.takes_in_place(wanted)
        with pytest.raises(MemoryRefused):
            client.submit(query, wanted)
        client.in_place.add("docs")  # a client that does not heed what it was told
        number = client.submit(query, wanted)
        assert collect(pool, client, 1)[number].status == "overloaded"  # until its session is renewed
