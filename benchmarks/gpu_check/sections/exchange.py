"""Query vectors through an arena between processes: a client writes them, this process searches them in place.

The arena is device memory, opened through CUDA IPC: there is none in a dry run. Descriptors and answers go through a
pipe, and the words that say that a vector is written through shared memory: this section tests the arena, not the rings
(see `benchmarks.ring`).
"""

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_check.load_driver import run_load
from benchmarks.gpu_check.report import Outcome, micros
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.time_limit import Skipped
from gpu.engine import c_callable

_SLOTS = 8
_EPOCH = 1
_JOIN_S = 30.0
_PAGE = 4096


def check(setup: Setup, outcome: Outcome) -> None:
    """Compare answers with those of the same queries passed directly. Raises AssertionError if they differ."""
    if not setup.on_gpu:
        raise Skipped("the arena is in a GPU's memory")
    try:
        from ipc.memory.cuda import CudaMemory
        from ipc.memory.shared import SharedMemory
        from ipc.native import atomics
        from ipc.session.device_arena import DeviceArena, arena_bytes
    except ImportError as error:
        raise Skipped(f"ipc needs {error.name}") from None
    queries = setup.data.queries[: 40 if setup.small else 1000]
    engine, params = setup.engine(min(64, setup.slots)), setup.params
    backend, spec = engine.backend(), (params.k, params.top_m, params.search_width, params.patience or 0)
    admit = c_callable(backend.admit_in_place, 7)
    direct = run_load(engine, queries, params).ids
    size = arena_bytes(_SLOTS, queries.shape[1] * 4)
    memory = CudaMemory.create(size, setup.device)
    arena = DeviceArena(memory, _SLOTS, queries.shape[1] * 4, _EPOCH)
    lease = arena.lease(_SLOTS)
    words = SharedMemory.create("trinity-words", _PAGE)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    references = (memory.reference, words.reference)
    client = context.Process(target=_client, args=(theirs, setup.device, *references, lease, queries), daemon=True)
    client.start()
    theirs.close()
    try:
        answers, took = [], []
        for number in range(1, len(queries) + 1):
            if not ours.poll(_JOIN_S):
                raise AssertionError("the client did not write its next query in time")
            slot = ours.recv()
            begin = time.perf_counter()
            while atomics.load_acquire(words.address) != number:
                assert time.perf_counter() < begin + _JOIN_S, "the client's device does not write its query"
            search = admit(backend.handle, arena.address_of(slot), 0, *spec)
            took.append(time.perf_counter() - begin)
            while search not in engine.extend():
                pass
            answers.append(engine.result(search)[0])
            engine.release(search)
            ours.send_bytes(answers[-1].tobytes())
        write_s = ours.recv() if ours.poll(_JOIN_S) else []
        client.join(_JOIN_S)
        assert client.exitcode == 0, f"the client ended with {client.exitcode}"
    finally:
        if client.is_alive():
            client.kill()
            client.join(_JOIN_S)
        ours.close()
        engine.close()
        arena.close()
        words.close()
    same = float(np.mean(np.array(answers) == direct))
    assert same == 1.0, f"only {same:.1%} of the ids are those of the queries handed over directly"
    outcome.data |= {"write_s": write_s, "take_s": took}
    for what, value in (
        ("queries from another process, same answers", f"{len(answers)} of {len(queries)}"),
        ("client: write vector and word, p50", micros(float(np.median(write_s)))),
        ("pool: wait until it is written, admit in place, p50", micros(float(np.median(took)))),
    ):
        outcome.add(what, value)


def _client(
    pipe: Connection, device: str, reference: Any, words: Any, lease: Any, queries: npt.NDArray[np.float32]
) -> None:
    """Write each query to the arena and send its slot; wait for the answer before the next one.

    The queries are in the GPU's memory already, like the output of an embedder on the device.
    """
    from ipc.memory.cuda import CudaMemory
    from ipc.memory.shared import SharedMemory
    from ipc.session.device_arena import LeasedSlots

    memory, shared = CudaMemory.open(reference, device), SharedMemory.open(words, max_size=_PAGE, writable=True)
    slots, word = LeasedSlots(memory, lease), memory.reach(shared.address, _PAGE)
    held, sources = _on_gpu(device, np.ascontiguousarray(queries, np.float32))
    times = []
    for number, source in enumerate(sources, 1):
        begin = time.perf_counter()
        slot = slots.write(source, word, number)
        times.append(time.perf_counter() - begin)
        pipe.send(slot)
        pipe.recv_bytes()
        slots.release(slot)
    slots.close()
    shared.close()
    held.close()
    pipe.send(times)


def _on_gpu(device: str, rows: npt.NDArray[np.float32]) -> tuple[Any, list[Any]]:
    """Copy rows to a GPU. Return their memory, and where each lies."""
    from ipc.memory.cuda import CudaMemory
    from ipc.memory.device import DeviceSpan

    each = rows[0].nbytes
    held = CudaMemory.create(rows.nbytes, device)
    held.write(0, rows)
    held.flush()
    return held, [DeviceSpan(held.address + number * each, each) for number in range(len(rows))]
