"""Execution of small searches with the machine code of a revision's kernels, interpreted on the CPU.

`counts` runs this program with that revision's `gpu` and `tests` on the path; it drives their workbench:

    python -m benchmarks.machine_code.executed LISTING INDEX.npz TOP_M stages|block
"""

import ctypes
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine_code.arithmetic import Arithmetic
from benchmarks.machine_code.interpreter import Memory
from benchmarks.machine_code.listing import kernels_of

SLOTS = 2
ARCHITECTURE = "sm_90"
BLOCK_THREADS = 128  # of a block per slot, like a resident block on a GPU with many slots
_PARAMETERS_AT = 0x210
_BYTES = 64 << 20


class InterpretedDriver:
    """The driver interface of the workbench. `counts`: kernel and executed instructions of each launch."""

    def __init__(self, listing: str) -> None:
        kernels = kernels_of(listing)
        self._names = list(kernels)
        self._memory = Memory(_BYTES)
        self._interpreter = Arithmetic(kernels, self._memory, _PARAMETERS_AT)
        self.counts: list[tuple[str, Counter[str], int]] = []

    def allocate(self, nbytes: int) -> int:
        return self._memory.allocate(nbytes)

    def allocate_pinned(self, nbytes: int) -> Any:
        address = self._memory.allocate(nbytes)
        pinned = importlib.import_module("gpu.cuda.driver").PinnedMemory
        return pinned(self._memory.view(address, nbytes), address)

    def copy_to_device(self, stream: int, address: int, source: npt.NDArray[Any]) -> None:
        self._memory.view(address, source.nbytes)[:] = np.frombuffer(source.tobytes(), np.uint8)

    def copy_to_host(self, stream: int, target: npt.NDArray[Any], address: int) -> None:
        target.view(np.uint8).reshape(-1)[:] = self._memory.view(address, target.nbytes)

    def fill(self, stream: int, address: int, word: int, count: int) -> None:
        self._memory.view(address, 4 * count).view(np.uint32)[:] = word

    def load_module(self, image: bytes) -> int:
        return 1

    def kernel(self, module: int, name: str, shared_bytes: int = 0) -> int:
        return self._names.index(name)

    def launch(self, stream: int, kernel: int, grid: Any, block: Any, arguments: Any, shared_bytes: int = 0) -> None:
        packed = b""
        for argument in arguments:
            align = min(8, ctypes.sizeof(argument))
            packed = packed.ljust(-(-len(packed) // align) * align, b"\0") + bytes(argument)
        name = self._names[kernel]
        threads = min(block[0], BLOCK_THREADS)
        found = self._interpreter.launch(name, grid[0], threads, packed, shared_bytes)
        self.counts.append((name, found.opcodes, found.barriers))

    def create_stream(self) -> int:
        return 1

    def synchronise(self, stream: int) -> None: ...


def main(listing: str, index: str, top_m: str, form: str) -> None:
    """Print, as JSON, a line per launch of a search's later extends: kernel, counts of opcodes, barriers, extends of
    single slots; then the results and their numbers of extends."""
    bench = importlib.import_module("tests.cuda.workbench")
    driver = InterpretedDriver(Path(listing).read_text())
    with np.load(index) as stored:
        arrays = dict(stored)
    {"stages": _stages, "block": _block}[form](bench, driver, bench.SearchParams(10, int(top_m), 4), arrays)


def _work(bench: Any, driver: InterpretedDriver, slots: int, dtype: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    rows = importlib.import_module(bench.true_distances.__module__)
    encoded = rows.encode(rows.checked_vectors(arrays["base"], "l2"), "l2", dtype)
    data = bench.IndexData(encoded, arrays["graph"], arrays["seeds"], None)
    return bench.Workbench(driver, [data], bench.Limits(slots=slots, max_top_m=512, max_k=16))


def _write(driver: InterpretedDriver, extends: int) -> None:
    for name, opcodes, barriers in driver.counts:
        print(json.dumps([name, opcodes, barriers, extends]))
    driver.counts.clear()


def _stages(bench: Any, driver: InterpretedDriver, params: Any, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Gather and merge several slots while all of them run. Distances are computed by numpy."""
    layout, base, queries = bench.layout, arrays["base"], arrays["queries"]
    work = _work(bench, driver, SLOTS, "float32", arrays)
    for slot in range(SLOTS):
        work.admit(slot, queries[slot], params)
    number = 0
    while not any(work.done(slot) for slot in range(SLOTS)):
        driver.counts.clear()
        if hasattr(layout, "GATHER_TASKS"):  # older revisions: one task list of all slots, built by a kernel
            work.launch(layout.GATHER_TASKS, SLOTS, work.shape.gather_shared_bytes)
            tasks = work.read("tasks", layout.TASK)[: work.read("counters", layout.COUNTERS)["tasks"][0]]
            nodes, asked, merge = tasks["node"], queries[tasks["slot"]], layout.MERGE_TOP_M
        else:
            nodes = work.read("nodes", np.uint32).reshape(SLOTS, -1)
            asked, merge = queries[:, None], layout.MERGE_AND_GATHER
        distances = np.square(base[nodes] - asked).sum(axis=-1).astype(np.float32)
        driver.copy_to_device(0, work.addresses["distances"], distances)
        numbers = merge.argument_values(limit=1, condition=0)
        work.launch(merge, SLOTS, work.shape.merge_shared_bytes, *numbers)
        number += 1
        if number > 1:
            _write(driver, SLOTS)
    print(json.dumps([[*work.result(slot, 10), work.extends(slot)] for slot in range(SLOTS) if work.done(slot)]))


def _block(bench: Any, driver: InterpretedDriver, params: Any, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Execute a block per query from its second extend to its end, including distances to float16 rows and the
    result."""
    found = []
    for query in arrays["queries"][:SLOTS]:
        work = _work(bench, driver, 1, "float16", arrays)
        work.admit(0, query, params)
        work.extend_fused(1, near=True)
        driver.counts.clear()
        work.extend_fused(1000, near=True)
        _write(driver, work.extends(0) - 1)
        found.append([*work.result(0, 10), work.extends(0)])
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
