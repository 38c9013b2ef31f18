"""Tests of the real bindings over a stub driver library: every call arrives with the right arguments.

The library is compiled from `stub_driver.c`, and a child process loads it instead of NVIDIA's.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc")


class Stub:
    """A stub library and the processes that load it; a context manager."""

    def __init__(self, library: Path) -> None:
        self._log = library.with_name("log")
        modules = ("gpu.cuda.engine", "ipc.session.device_arena", "cuda.bindings.driver", "cuda.core")
        self._fork_server = ForkServer(*modules, LD_LIBRARY_PATH=str(library.parent))

    def run(self, script: str, **environment: str) -> tuple[list[str], list[str]]:
        """Run a script. Return its output and the calls that the library received."""
        self._log.unlink(missing_ok=True)
        done = self._fork_server.run("-c", script, STUB_CUDA_LOG=str(self._log), **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), self._log.read_text().splitlines() if self._log.exists() else []

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *error: object) -> None:
        self._fork_server.__exit__(*error)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    pytest.importorskip("cuda.bindings.driver")
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    options = ("-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(path), str(HERE / "stub_driver.c"))
    subprocess.run([COMPILER, *options, "-ldl"], check=True, timeout=60)
    with Stub(path) as stub:
        yield stub


OPEN = """
import ctypes, numpy as np
from gpu import DeviceError, DeviceUnavailable, OutOfDeviceMemory, check_device
from gpu.cuda.cuda_driver import CudaDriver
from gpu.cuda.driver import Dim
driver = CudaDriver("cuda:1")
stream = driver.create_stream()
"""


def test_a_device_is_found_by_number_and_by_uuid_and_reports_its_properties(stub: Stub) -> None:
    script = OPEN + (
        "print(driver.name, driver.uuid, driver.arch, driver.multiprocessors, *driver.memory())\n"
        "print(CudaDriver(driver.uuid).name)\n"
        "for name in ('cuda:2', 'GPU-00000000-0000-0000-0000-000000000000'):\n"
        "    try: check_device(name)\n"
        "    except DeviceUnavailable as error: print(error)\n"
    )
    out, _ = stub.run(script)
    assert out[0] == "Stub 1 GPU-10111213-1415-1617-1819-1a1b1c1d1e1f sm_90 132 1073741824 2147483648"
    assert out[1] == "Stub 1"
    assert out[2] == "device 'cuda:2': this process sees 2 CUDA devices"
    assert out[3].startswith("device 'GPU-00000000-0000-0000-0000-000000000000' is none of GPU-00010203-0405-")


def test_memory_is_allocated_filled_copied_and_freed(stub: Stub) -> None:
    script = OPEN + (
        "address, pinned, found = driver.allocate(1024), driver.allocate_pinned(512), np.zeros(256, np.uint32)\n"
        "driver.fill(stream, address, 7, 256)\n"
        "driver.copy_to_device(stream, address, np.arange(4, dtype=np.uint32))\n"
        "driver.copy_to_host(stream, found, address)\n"
        "print(found[:8].tolist(), pinned.view.any())\n"
        "driver.free(address); driver.free_pinned(pinned)\n"
        "try: driver.allocate(1 << 40)\n"
        "except OutOfDeviceMemory as error: print(error)\n"
        "try: driver.copy_to_host(stream, found[::2], address)\n"
        "except DeviceError as error: print(error)\n"
    )
    out, calls = stub.run(script)
    assert out[0] == "[0, 1, 2, 3, 7, 7, 7, 7] False"
    assert out[1] == "1099511627776 bytes are needed, 1073741824 of 2147483648 are free on Stub 1"
    assert "not in C order" in out[2]
    assert "cuMemHostAlloc 512 3" in calls  # portable and mapped
    assert calls[-2:] == ["cuMemFree", "cuMemFreeHost"]


def test_a_launch_passes_grid_block_shared_memory_and_arguments(stub: Stub) -> None:
    script = OPEN + (
        "kernel = driver.kernel(driver.load_module(b'image'), 'extend_resident', 60000)\n"
        "arguments = (ctypes.c_uint64(5), ctypes.c_uint32(6))\n"
        "driver.launch(stream, kernel, Dim(3), Dim(128), arguments, 60000)\n"
        "print(kernel, stream, driver.idle(stream))\n"
    )
    out, calls = stub.run(script)
    kernel, stream, idle = out[0].split()
    assert idle == "True"
    assert calls[-5:-1] == [
        "cuModuleLoadData image",
        f"cuModuleGetFunction {kernel} extend_resident",
        f"cuFuncLoad {kernel} 0 0 0",
        f"cuFuncSetAttribute {kernel} 8 60000 0",
    ]
    assert calls[-1] == (
        f"cuLaunchKernel {kernel} grid 3 1 1 block 128 1 1 shared 60000 stream {stream} arguments 5 6 extra 0"
    )
    out, _ = stub.run(script, STUB_CUDA_BUSY="1")
    assert out[0].endswith("False")


def test_the_bandwidth_of_a_copy_is_taken_between_two_events(stub: Stub) -> None:
    script = (
        "from benchmarks.gpu_check.device_times import copy_bytes_s\nprint(copy_bytes_s('cuda:1') / 2**28 * 2.5e-3)\n"
    )
    out, calls = stub.run(script)
    assert float(out[0]) == pytest.approx(1)
    copied = next(number for number, call in enumerate(calls) if call.startswith("cuMemcpyDtoDAsync"))
    assert [call.split()[0] for call in calls[copied - 1 : copied + 2 : 2]] == ["cuEventRecord"] * 2


def test_a_loop_is_a_conditional_node_whose_body_is_captured_separately(stub: Stub) -> None:
    script = OPEN + (
        "kernel = driver.kernel(driver.load_module(b'image'), 'merge_and_gather')\n"
        "driver.begin_capture(stream)\n"
        "loop = driver.begin_while(stream)\n"
        "driver.launch(loop.stream, kernel, Dim(1), Dim(1), (ctypes.c_uint64(loop.handle), ctypes.c_uint32(0)))\n"
        "driver.end_while(loop)\n"
        "graph = driver.end_capture(stream)\n"
        "driver.replay(stream, graph); driver.destroy_graph(graph)\n"
        "print(stream, loop.stream, loop.handle, graph)\n"
        "driver.begin_capture(stream); driver.begin_while(stream); driver.abandon_capture(stream)\n"
    )
    out, calls = stub.run(script)
    stream, body, handle, graph = out[0].split()
    begin = calls.index(f"cuStreamBeginCapture {stream} 2")  # 2: relaxed
    names = [call.split()[0] for call in calls[begin:]]
    assert names[1:5] == [
        "cuGraphConditionalHandleCreate",
        "cuGraphAddNode",
        "cuStreamUpdateCaptureDependencies",
        "cuStreamCreate",
    ]
    assert calls[begin + 1].endswith(" 1 1")  # initialised to 1 in each replay
    assert calls[begin + 2].endswith(f"after 0 type 13 handle {handle} kind 1 size 1")  # conditional, while
    assert calls[begin + 5] == f"cuStreamBeginCaptureToGraph {body} {0x5550} 0 0 2"
    assert f"stream {body} arguments {handle} 0" in calls[begin + 6]
    assert calls[begin + 7].startswith(f"cuStreamEndCapture {body}")
    assert calls[begin + 8].startswith(f"cuStreamDestroy_v2 {body}")
    assert names[9:15] == [
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphDestroy",
        "cuGraphUpload",
        "cuGraphLaunch",
        "cuGraphExecDestroy",
    ]
    assert calls[begin + 13].startswith(f"cuGraphLaunch {graph} {stream}")
    assert names.count("cuStreamBeginCapture") + names.count("cuStreamBeginCaptureToGraph") == names.count(
        "cuStreamEndCapture"
    )


def test_an_arena_in_gpu_memory_uses_the_real_bindings(stub: Stub) -> None:
    script = """
import numpy as np
from ipc.memory.cuda import CudaMemory
from ipc.session.device_arena import DeviceArena, LeasedSlots, arena_bytes
from ipc.memory.device import CudaReference, DeviceSpan
from gpu.cuda.block_copy import BlockCopy
owner = CudaMemory.create(arena_bytes(2, 64), "cuda:0")
arena = DeviceArena(owner, 2, 64, 1)
lease = arena.lease(2)
sent = owner.reference
peer = CudaMemory.open(CudaReference(1, sent.device, sent.handle, sent.size), "cuda:0")
client = LeasedSlots(peer, lease)
words, out = np.zeros(512, np.int64), np.zeros(16, np.float32)
word = peer.reach(words.ctypes.data, words.nbytes) + 48
owner.write(128, np.arange(16, dtype=np.float32))
slot = client.write(DeviceSpan(owner.address + 128, 64), word, 9)
owner.read(arena.address_of(slot) - owner.address, out)
print(out.tolist() == list(range(16)), words[6], slot, peer.idle())
named = CudaMemory.create(64, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f")
peer.load(b"image", "copy_blocks")
copy = BlockCopy.of(peer.address, named.address, (9, 8), 64, 6, [7, 2], [1, 5])
peer.launch("copy_blocks", copy.grid, 512, copy)
print(peer.stream)
print(named.reference.device, named.__cuda_array_interface__["shape"])
client.close()
arena.close()
"""
    out, calls = stub.run(script)
    assert (out[0], out[2]) == ("True 9 0 True", "cuda:1 (64,)")
    (launched,) = [call for call in calls if call.startswith("cuLaunchKernel")]
    assert f"grid 1 1 1 block 512 1 1 shared 0 stream {out[1]} " in launched
    words = [call for call in calls if "Value32" in call]
    assert words == ["cuStreamWriteValue32 9 0"]
    assert "cuMemHostRegister 4096 3" in calls  # portable, mapped
    assert "cuMemHostUnregister" in calls
    allocated = [int(call.split()[1]) for call in calls if call.startswith("cuMemAlloc")]
    assert [nbytes % (2 << 20) for nbytes in allocated] == [0, 0], "a handle opens whole pages, which hold nothing else"
    assert "cuIpcOpenMemHandle 1" in calls  # lazy peer access
    names = [call.split()[0] for call in calls]
    assert names[-2:] == ["cuMemFree", "cuCtxPopCurrent_v2"]
    assert names.count("cuCtxPushCurrent_v2") == names.count("cuCtxPopCurrent_v2")


def test_a_copy_and_its_word_are_four_driver_calls_from_compiled_code(stub: Stub) -> None:
    script = """
import ctypes
import numpy as np
from ipc.errors import MemoryRefused
from ipc.memory.cuda import CudaMemory
from ipc.memory.device import DeviceSpan
memory = CudaMemory.create(4096, "cuda:0")
found = np.zeros(1024, np.uint32)
library, word = ctypes.CDLL("libcuda.so.1"), memory.address + 64
memory.write(256, np.arange(16, dtype=np.float32))
library.stub_note(b"before")
memory.send(512, DeviceSpan(memory.address + 256, 64), word, 3_000_000_000)
library.stub_note(b"after")
memory.read(0, found)
print(found[16], found[128:144].view(np.float32).tolist() == list(range(16)), memory.stream)
library.stub_fail(b"cuStreamWriteValue32")
try: memory.send(256, DeviceSpan(memory.address + 256, 64), word, 1)
except MemoryRefused as error: print(error)
"""
    out, calls = stub.run(script)
    word, copied, stream = out[0].split()
    assert (word, copied) == ("3000000000", "True")
    first = calls.index("before")
    pushed, copied, stored, popped, end = calls[first + 1 : first + 6]
    wanted = (f"cuMemcpyDtoDAsync 64 {stream}", "cuStreamWriteValue32 3000000000 0", "after")
    assert (copied, stored, end) == wanted
    assert (pushed.split()[0], popped.split()[0]) == ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    assert out[1] == "cuStreamWriteValue32 failed: <CUresult.CUDA_ERROR_LAUNCH_FAILED: 719>"
    assert calls[-1].startswith("cuCtxPopCurrent_v2"), "a failed call leaves no context behind either"
