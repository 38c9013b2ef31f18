"""Query vectors through an arena between processes: a client writes them, this process searches them in place.

On a GPU the arena is device memory, opened through CUDA IPC; in a dry run it is a memfd. Descriptors and answers go
through a pipe, and the words that say that a vector is written through shared memory: this section tests the arena, not
the rings (see `benchmarks.ring`).
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
    try:
        from ipc.memory.device import DeviceMemory, HostMemory
        from ipc.memory.shared import SharedMemory
        from ipc.native import atomics
        from ipc.session.device_arena import DeviceArena, arena_bytes
    except ImportError as error:
        raise Skipped(f"ipc needs {error.name}") from None
    queries = setup.data.queries[: 40 if setup.small else 1000]
    engine, params = setup.engine(min(64, setup.slots)), setup.params
    backend, spec = engine.backend(), (params.k, params.top_m, params.search_width, params.patience or 0)
    admit = c_callable(backend.admit_in_place or backend.admit, 7)
    direct = run_load(engine, queries, params).ids
    size = arena_bytes(_SLOTS, queries.shape[1] * 4)
    memory: DeviceMemory
    if setup.on_gpu:
        from ipc.memory.cuda import CudaMemory

        memory = CudaMemory.create(size, setup.device)
    else:
        memory = HostMemory.create(size)
    arena = DeviceArena(memory, _SLOTS, queries.shape[1] * 4, _EPOCH)
    _, lease = arena.lease(_SLOTS)
    words = SharedMemory.create("trinity-words", _PAGE)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    references = (memory.reference, words.reference)
    client = context.Process(target=_client, args=(theirs, setup.device, *references, lease, queries), daemon=True)
    client.start()
    theirs.close()
    try:
        found, took = [], []
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
            found.append(engine.result(search)[0])
            engine.release(search)
            ours.send_bytes(found[-1].tobytes())
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
    same = float(np.mean(np.array(found) == direct))
    assert same == 1.0, f"only {same:.1%} of the ids are those of the queries handed over directly"
    outcome.data |= {"write_s": write_s, "take_s": took}
    for what, value in (
        ("queries from another process, same answers", f"{len(found)} of {len(queries)}"),
        ("client: write vector and word, p50", micros(float(np.median(write_s)))),
        ("pool: wait until it is written, admit in place, p50", micros(float(np.median(took)))),
        ("through CUDA IPC", "yes" if setup.on_gpu else "skipped: no GPU (host memory instead)"),
    ):
        outcome.add(what, value)


def _client(
    pipe: Connection, device: str, reference: Any, words: Any, lease: Any, queries: npt.NDArray[np.float32]
) -> None:
    """Write each query to the arena and send its slot; wait for the answer before the next one.

    On a GPU the queries are in its memory already, like the output of an embedder on the device.
    """
    from ipc.memory.device import CudaReference, Source
    from ipc.memory.shared import SharedMemory
    from ipc.session.device_arena import LeasedSlots, open_memory

    memory, shared = open_memory(reference, device), SharedMemory.open(words, max_size=_PAGE, writable=True)
    slots, word = LeasedSlots(memory, lease), memory.reach(shared.address, _PAGE)
    sources: list[Source] = list(np.ascontiguousarray(queries, np.float32))
    held = _on_gpu(device, sources) if isinstance(reference, CudaReference) else None
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
    if held is not None:
        held.close()
    pipe.send(times)


def _on_gpu(device: str, sources: list[Any]) -> Any:
    """Copy host arrays of one size to a GPU; `sources` become spans of its memory."""
    from ipc.memory.cuda import CudaMemory
    from ipc.memory.device import DeviceSpan

    each = sources[0].nbytes
    held = CudaMemory.create(each * len(sources), device)
    address = held.__cuda_array_interface__["data"][0]
    for number, row in enumerate(sources):
        held.write(number * each, row)
        sources[number] = DeviceSpan(address + number * each, each)
    held.flush()
    return held
