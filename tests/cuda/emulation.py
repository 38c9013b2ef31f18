"""A driver (gpu.cuda.driver.Driver) that runs the kernels' source on the CPU, under sanitizers.

The device is a process: an executable of the kernels, compiled with g++ and `host.h`, that reads commands from a pipe
(`emulator.cpp`). Like a device it runs asynchronously; a fault terminates it, and the next call that waits for it
raises DeviceError with the sanitizer's report.
"""

import contextlib
import functools
import itertools
import mmap
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from gpu.cuda.compiler import kernel_source
from gpu.cuda.driver import Argument, Dim, EntryPoints, Loop, PinnedMemory
from gpu.cuda.layout import EXTEND_RESIDENT, KERNELS
from gpu.errors import DeviceError
from tests.cuda.build_cache import build_once
from tests.cuda.entry_points import DriverCallbacks
from tests.cuda.workbench import IN_BLOCKS

HERE = Path(__file__).parent
_PROGRAM = "emulator"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BLOCKS_AT_ONCE = ("-fsanitize=thread",)  # each block is a thread: see host.h
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
    "-Wall",
    "-Wno-unknown-pragmas",
)
_ORDERS = """
ALLOCATE FREE WRITE READ FILL MAP UNMAP LAUNCH LOOP END_LOOP SYNCHRONISE WAITS STAY AWAY HOST COPIES
"""
_KIND = {name: number for number, name in enumerate(_ORDERS.split())}
_HEAD = struct.Struct("<IIQQQ")
_PAUSE_S = 100e-6
LOOK_NS = 20_000
"""For the engine's `fault_poll_ns`: a host that asks the emulated device soon leaves it the core while it waits."""
_KERNELS = (*KERNELS, IN_BLOCKS)
_NAMES = [kernel.name for kernel in _KERNELS]
_C_NAMES: dict[type, str] = {np.uint32: "uint32", np.uint64: "uint64"}


def require_compiler() -> None:
    """Skip the test where there is no g++; fail it in CI, where no kernel would run otherwise."""
    if not shutil.which("g++"):
        _missing("g++ is not installed")


def require_thread_sanitizer(directory: Path) -> None:
    """Like `require_compiler`, for the thread sanitizer: it needs its library and a memory layout that it supports."""
    require_compiler()
    unit, program = directory / "empty.cpp", directory / "empty"
    unit.write_text("int main() {}")
    for command in (["g++", *BLOCKS_AT_ONCE, "-o", str(program), str(unit)], [str(program)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            _missing(f"no thread sanitizer: {done.stderr}")


def _missing(what: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}: in CI the kernels must run")
    pytest.skip(what)


@functools.cache
def emulator(sanitizers: tuple[str, ...] = SANITIZERS, source: str | None = None) -> Path:
    """Return an emulator of the kernels, or of another source, built once for all processes. Raises DeviceError."""
    require_compiler()
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    text, command = _unit(kernel_source() if source is None else source), ["g++", *_FLAGS, *sanitizers, f"-I{HERE}"]

    def make(folder: Path) -> None:
        (folder / "kernels.cpp").write_text(text)
        files = ["-o", str(folder / _PROGRAM), str(folder / "kernels.cpp")]
        done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise DeviceError(f"the emulation does not compile:\n{done.stderr}")

    parts = [path.read_text() for path in sorted((*HERE.glob("*.h"), *HERE.glob("*.cpp")))]
    return build_once(make, text, " ".join(command), version, *parts) / _PROGRAM


def _unit(source: str) -> str:
    blocks = (HERE / "blocks.cu").read_text()
    return "\n".join(('#include "fibers.h"', source, blocks, _dispatch(), '#include "emulator.cpp"'))


def _dispatch() -> str:
    """Return C that calls a kernel by its number in _KERNELS."""
    cases = []
    for number, kernel in enumerate(_KERNELS):
        types = ["Batch", *(_C_NAMES[kind] for _, kind in kernel.arguments)]
        values = ", ".join(f"*static_cast<const {kind}*>(arguments[{i}])" for i, kind in enumerate(types))
        cases.append(f"case {number}: return {kernel.name}({values});")
    return (
        '#line 1 "dispatch"\nvoid run_kernel(uint32 number, const void* const* arguments) {\nswitch (number) {\n'
        + "\n".join(cases)
        + "\n}\n}"
    )


class EmulatedDriver:
    """An emulated device. `block_threads` limits the threads of a block: fewer are faster, with the same results."""

    name, uuid, arch, multiprocessors = "emulated", "GPU-" + "0" * 8 + "-0000" * 3 + "-" + "0" * 12, "sm_90", 2

    def __init__(self, program: Path, seed: int = 0, block_threads: int = 1024) -> None:
        self._block_threads, self._open, self._fault_reported = block_threads, True, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the device)
        self._process = subprocess.Popen(
            [str(program), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={
                **os.environ,
                "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
                "UBSAN_OPTIONS": "print_stacktrace=0",
                "TSAN_OPTIONS": "halt_on_error=1",
            },
        )
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count(1)
        self._pinned: dict[int, mmap.mmap] = {}
        self._captures: dict[int, list[bytes]] = {}
        self._graphs: dict[int, bytes] = {}
        self._stays: set[int] = set()  # streams and graphs of a resident kernel
        self._sizes: dict[int, int] = {}
        self._called_back = DriverCallbacks(self)
        self._awaiting_reply = False  # `idle` has sent a query that is not answered yet

    def memory(self) -> tuple[int, int]:
        total = 1 << 30
        return total - sum(self._sizes.values()), total

    def entry_points(self) -> EntryPoints:
        return self._called_back.points

    def raise_for(self, call: str, code: int) -> NoReturn:
        self._called_back.raise_for()

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        address = self._request(_command("ALLOCATE", nbytes))
        self._sizes[address] = nbytes
        return address

    def free(self, address: int) -> None:
        del self._sizes[address]
        self._send(_command("FREE", address))

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        path = Path(self._folder.name) / str(next(self._numbers))
        with path.open("w+b") as file:
            file.truncate(nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
        address = self._request(_command("MAP", nbytes, data=str(path).encode()))
        self._pinned[address] = memory
        return PinnedMemory(np.frombuffer(memory, np.uint8), address)

    def free_pinned(self, memory: PinnedMemory) -> None:
        self._send(_command("UNMAP", memory.address, len(self._pinned.pop(memory.address))))

    def copy_to_device(self, stream: int, address: int, source: npt.NDArray[Any]) -> None:
        assert source.flags.c_contiguous
        self._put(stream, _command("WRITE", address, data=source.tobytes()))

    def copy_to_host(self, stream: int, target: npt.NDArray[Any], address: int) -> None:
        assert target.flags.c_contiguous
        assert stream not in self._captures, "the emulation captures no copies to the host"
        self._send(_command("READ", address, target.nbytes))
        target.view(np.uint8).reshape(-1)[:] = np.frombuffer(self._receive(target.nbytes), np.uint8)

    def fill(self, stream: int, address: int, word: int, count: int) -> None:
        self._put(stream, _command("FILL", address, word, count))

    # ---- kernels

    def load_module(self, image: bytes) -> int:
        return 1

    def kernel(self, module: int, name: str, shared_bytes: int = 0) -> int:
        return _NAMES.index(name) + 1

    def launch(
        self, stream: int, kernel: int, grid: Dim, block: Dim, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        assert grid[1:] == (1, 1)
        assert block[1:] == (1, 1)
        data = [struct.pack("<IIII", kernel - 1, grid[0], min(block[0], self._block_threads), shared_bytes)]
        for argument in arguments:
            raw = bytes(argument)
            data += [struct.pack("<Q", len(raw)), raw.ljust(-(-len(raw) // 8) * 8, b"\0")]
        stays = _NAMES[kernel - 1] == EXTEND_RESIDENT.name
        if stays:
            self._stays.add(stream)
        self._put(stream, _command("STAY" if stays else "LAUNCH", data=b"".join(data)))

    def resident_blocks(self, kernel: int, threads: int, shared_bytes: int) -> int:
        return 2

    def act_as_host(self, batch: Argument, entries: int, slots: int, lines: int) -> None:
        """Run the resident kernel in the device's process over queries whose lines are at an address."""
        self._send(_command("HOST", entries, slots, lines, bytes(batch)))

    def waits(self) -> int:
        """Return the number of barriers that blocks have passed so far."""
        return self._request(_command("WAITS"))

    def most_copies(self) -> int:
        """Return the most asynchronous copies that a thread had in flight at once since the last call."""
        return self._request(_command("COPIES"))

    # ---- streams, events

    def create_stream(self) -> int:
        return next(self._numbers)

    def destroy_stream(self, stream: int) -> None: ...

    def idle(self, stream: int) -> bool:
        """Return whether a stream is idle. Wait briefly if it is not, so that polling leaves the core to the device."""
        if stream in self._stays:
            away = bool(self._request(_command("AWAY")))
            if not away:
                time.sleep(_PAUSE_S)
            return away
        if not self._awaiting_reply:
            self._send(_command("SYNCHRONISE"))
            self._awaiting_reply = True
        if not select.select([self._pipes()[1]], [], [], _PAUSE_S)[0]:
            return False
        self._await_reply()
        return True

    def synchronise(self, stream: int) -> None:
        self._request(_command("SYNCHRONISE", stream in self._stays))

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        assert stream not in self._captures
        self._captures[stream] = []

    def end_capture(self, stream: int) -> int:
        graph = next(self._numbers)
        self._graphs[graph] = b"".join(self._captures.pop(stream))
        return graph

    def abandon_capture(self, stream: int) -> None:
        del self._captures[stream]

    def begin_while(self, stream: int) -> Loop:
        loop = Loop(next(self._numbers), self.allocate(256))
        self._captures[stream].append(_command("LOOP", loop.handle))
        self._captures[loop.stream] = self._captures[stream]
        return loop

    def end_while(self, loop: Loop) -> None:
        self._captures.pop(loop.stream).append(_command("END_LOOP"))

    def replay(self, stream: int, graph: int) -> None:
        self._send(self._graphs[graph])

    def destroy_graph(self, graph: int) -> None:
        del self._graphs[graph]

    def close(self) -> None:
        """Stop the device. Raises DeviceError if it had a fault that no call has reported. Idempotent."""
        if not self._open:
            return
        self._open = False
        orders, answers = self._pipes()
        try:
            with contextlib.suppress(BrokenPipeError):
                orders.close()
            code = self._process.wait(timeout=60)
            if code and not self._fault_reported:
                raise DeviceError(self._report())
        finally:
            self._process.kill()
            self._process.wait(timeout=60)
            answers.close()
            self._errors.close()
            self._folder.cleanup()

    # ---- commands

    def _put(self, stream: int, command: bytes) -> None:
        if stream in self._captures:
            self._captures[stream].append(command)
        else:
            self._send(command)

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _await_reply(self) -> None:
        if self._awaiting_reply:
            self._awaiting_reply = False
            self._receive(8)

    def _send(self, command: bytes) -> None:
        self._await_reply()
        try:
            self._pipes()[0].write(command)
            self._pipes()[0].flush()
        except BrokenPipeError:
            raise DeviceError(self._report()) from None

    def _request(self, command: bytes) -> int:
        self._send(command)
        return int.from_bytes(self._receive(8), "little")

    def _receive(self, nbytes: int) -> bytes:
        answer = self._pipes()[1].read(nbytes)
        if len(answer) < nbytes:
            raise DeviceError(self._report())
        return answer

    def _report(self) -> str:
        self._fault_reported = True
        self._process.wait(timeout=60)
        self._errors.seek(0)
        return f"the emulated device ended: {self._errors.read().decode(errors='replace')}"


def _command(kind: str, a: int = 0, b: int = 0, c: int = 0, data: bytes = b"") -> bytes:
    return _HEAD.pack(_KIND[kind], len(data), a, b, c) + data
