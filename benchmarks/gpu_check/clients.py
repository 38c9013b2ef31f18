"""Two compiled clients of a pool: prefill queries at given arrival times, and a flood of decode queries.

One thread beside the pool's own runs both. It keeps a core busy and never enters Python, so that it can saturate a GPU.
Requests and results go through the rings of two real sessions.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_check.load_driver import LoadResult
from gpu import SearchParams
from ipc import SearchSpec
from ipc.native import atomics, intrinsics
from ipc.native.atomics import ProducerEnd, WatchRow
from ipc.native.compiled import PACKAGE, compiler_for
from ipc.native.intrinsics import words
from ipc.native.records import address_of, array_at
from ipc.ring.descriptors import STAGES
from ipc.session.parameters import Limits, pack
from runtime.testing.pool import InProcessPool

_compiled = compiler_for(PACKAGE, Path(__file__).parent)
_HEADER, _PAYLOAD = 8, 64  # bytes of a slot before its header, and before its payload
_IDLE_PER_YIELD = 32
_ends_at, _rows_at = array_at(ProducerEnd), array_at(WatchRow)

# Words of a run's state. STOP: 1 ends it. Counts: PREFILL queries sent; DECODE_SENT; decode queries ANSWERED, and of
# these IN_FLOOD, before the end of the flood; ERRORS: answers that are errors. REFUSAL: negative error code of a ring
# that rejected a request. LASTED: duration of the flood in ns.
(STOP, PREFILL, DECODE_SENT, ANSWERED, IN_FLOOD, ERRORS, REFUSAL, LASTED) = range(8)


class Clients:
    """Two sessions with a pool, which the thread that calls `run` steps."""

    def __init__(self, pool: InProcessPool, params: SearchParams, queries: npt.NDArray[np.float32]) -> None:
        """Attach the sessions. queries: [n, dim], sent cyclically by each client."""
        self._pool, self._queries = pool, np.ascontiguousarray(queries, np.float32)
        self._sessions = [pool.attach(stage) for stage in STAGES]
        first = self._sessions[0]
        limits = Limits(first.catalogue, first.max_k, first.max_top_m)
        parameters = (params.k, params.top_m, params.search_width, params.patience)
        self._packed = np.array(
            [pack(_spec(stage, *parameters), first.epoch, limits).words for stage in STAGES], np.int64
        )
        attached = [session.attachment for session in self._sessions]
        self._ends = np.array([address_of(one.requests.end) for one in attached], np.int64)
        self._watches = np.array([address_of(one.watch.table) for one in attached], np.int64)
        self._k, self._next_ids = params.k, np.ones(2, np.int64)
        self.run(np.zeros(0), 0, 0.0, 1.0)  # compiles

    def run(
        self, arrivals_s: npt.NDArray[np.float64], most: int, least_s: float, limit_s: float
    ) -> tuple[LoadResult, float]:
        """Send a prefill query at each of these times, with up to `most` decode queries outstanding, for `least_s` at
        least. Returns the prefill queries' results and the rate of answered decode queries per second.

        Latency is from arrival to publication of the answer. After `limit_s` no more queries are sent. Raises
        AssertionError if the pool answers with an error or its ring rejects a client.
        """
        count = len(arrivals_s)
        due, took = (arrivals_s * 1e9).astype(np.int64), np.full(count, -1, np.int64)
        ids, state = np.full((count, self._k), -1, np.int64), np.zeros(LASTED + 1, np.int64)
        self._run_pool(
            lambda: _run_clients(
                self._ends, self._watches, self._packed, self._next_ids, self._queries, due, took, ids,
                np.array([most, int(least_s * 1e9), int(limit_s * 1e9)]), state,
            ),
            state,
        )  # fmt: skip
        self._next_ids += state[[PREFILL, DECODE_SENT]]
        assert not state[REFUSAL], f"the pool's ring rejected a client with error {state[REFUSAL]}"
        assert not state[ERRORS], f"the pool answered {state[ERRORS]} queries with an error"
        latency, seconds = np.where(took >= 0, took / 1e9, np.nan), float(state[LASTED]) / 1e9
        load = LoadResult(ids, np.empty((count, 0), np.float32), latency, seconds, 0, 0, 0.0)
        return load, float(state[IN_FLOOD]) / max(seconds, 1e-9)

    def _run_pool(self, ask: Callable[[], None], state: npt.NDArray[np.int64]) -> None:
        """Step the pool in this thread while the clients run in theirs."""
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            while thread.is_alive():
                self._pool.step()
        finally:
            state[STOP] = 1
            thread.join()

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def _spec(stage: Any, k: int, top_m: int, width: int, patience: int | None) -> SearchSpec:
    return SearchSpec("docs", k, stage, top_m, width, patience)


@_compiled
def _run_clients(
    ends: Any, watches: Any, packed: Any, next_ids: Any, vectors: Any, due: Any, took: Any, ids: Any, limits: Any,
    state: Any,
) -> None:  # fmt: skip
    """Send and receive; see `Clients.run`. limits: most, least_ns, limit_ns. Returns when all queries are answered,
    when stopped, or after twice `limit_ns`."""
    prefill, decode = _ends_at(ends[0])[0], _ends_at(ends[1])[0]
    prefill_results, decode_results = _rows_at(watches[0])[0], _rows_at(watches[1])[0]
    # Keep at most as many outstanding as the result ring holds: with a full ring the pool backs off from the client.
    slots, most, least_ns, limit_ns = prefill_results.slots, limits[0], limits[1], limits[2]
    count, size, sent_count, answered, idle = len(due), 4 * vectors.shape[1], 0, 0, 0
    begin = intrinsics.monotonic_ns()
    while intrinsics.load_acquire(state.ctypes.data + 8 * STOP) == 0:
        now = intrinsics.monotonic_ns() - begin
        flood = now < limit_ns and (answered < count or now < least_ns)
        if flood:
            state[LASTED] = now
        elif now >= 2 * limit_ns or (answered == sent_count and state[ANSWERED] == state[DECODE_SENT]):
            break
        idle += 1
        if flood and sent_count < count and due[sent_count] <= now and sent_count - answered < slots:
            vector = vectors.ctypes.data + (sent_count % len(vectors)) * size
            sent = _send(prefill, vector, size, next_ids[0] + sent_count, begin + due[sent_count], packed[0])
            if sent >= 0:
                sent_count, idle = sent_count + 1, 0
            elif sent != atomics.FULL:
                state[REFUSAL] = sent
                break
        if flood and state[DECODE_SENT] - state[ANSWERED] < min(most, slots):
            vector = vectors.ctypes.data + ((state[DECODE_SENT] + len(vectors) // 2) % len(vectors)) * size
            sent = _send(decode, vector, size, next_ids[1] + state[DECODE_SENT], begin + now, packed[1])
            if sent >= 0:
                state[DECODE_SENT], idle = state[DECODE_SENT] + 1, 0
            elif sent != atomics.FULL:
                state[REFUSAL] = sent
                break
        slot = _result(prefill_results)
        if slot:
            header = words(slot + _HEADER, 6)
            number = header[0] - next_ids[0]
            if 0 <= number < sent_count:  # else from an earlier run that timed out
                state[ERRORS] += _is_error(header)
                if not _is_error(header):
                    took[number] = header[5] - begin - due[number]
                    found = min(header[2] & 0xFFFFFFFF, ids.shape[1])
                    intrinsics.copy(ids.ctypes.data + number * ids.strides[0], slot + _PAYLOAD, 8 * found)
                answered += 1
            _release(prefill_results)
            idle = 0
        slot = _result(decode_results)
        if slot:
            header = words(slot + _HEADER, 6)
            if header[0] >= next_ids[1]:
                state[ERRORS] += _is_error(header)
                state[ANSWERED] += 1
                state[IN_FLOOD] += flood
            _release(decode_results)
            idle = 0
        if idle >= _IDLE_PER_YIELD:
            intrinsics.sched_yield()
            idle = 0
    state[PREFILL] = sent_count


@_compiled
def _send(end: ProducerEnd, vector: int, size: int, request_id: int, arrival: int, packed: Any) -> int:
    """Publish a request to a ring. Returns a negative error code if that fails."""
    refusal = atomics.send_error(end, size)
    if refusal < 0:
        return refusal
    slot = atomics.next_slot(end)
    header = words(slot + _HEADER, 6)
    header[0], header[1], header[2] = request_id, 0, arrival
    header[3], header[4], header[5] = packed[0], packed[1], packed[2]
    intrinsics.copy(slot + _PAYLOAD, vector, size)
    return atomics.publish_slots(end, 1)


@_compiled
def _result(watch: WatchRow) -> int:
    """Return the address of the next result's slot, 0 if there is none yet."""
    if not atomics.has_message(watch):
        return 0
    return watch.slot + (watch.position % watch.slots) * watch.stride


@_compiled
def _is_error(header: Any) -> Any:
    return (header[1] >> 32) & 0xFF != 0


@_compiled
def _release(watch: WatchRow) -> None:
    """Release the slot to the pool."""
    watch.position += 1
    # SYNC POINT: reader position, see `RingProducer.free`.
    watch.ring[0].reader = watch.position
