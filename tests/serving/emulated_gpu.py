"""Emulated GPU for prefill and decode: the GPU code path over CPU tensors and a fake driver."""

import ctypes
import functools
import subprocess
from pathlib import Path

from gpu.cuda.compiler import kernel_source
from ipc import HandoverSource
from ipc.handover.source import LEASE_MS
from ipc.memory.device import CudaReference
from runtime.serving.kv.transport import CudaTransport
from runtime.serving.model.model_info import Kernels
from tests.cuda.build_cache import build_once
from tests.cuda.emulation import require_compiler
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere

_HOST = """
struct alignas(16) uint4 { unsigned x, y, z, w; };
static thread_local struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define min(a, b) ((a) < (b) ? (a) : (b))
static uint4 __ldcs(const uint4* address) { return *address; }
static void __stcs(uint4* address, uint4 value) { *address = value; }
"""
_LAUNCH = """
extern "C" void launch_copy_blocks(unsigned blocks, unsigned threads, const BlockCopy* copy) {
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) copy_blocks(*copy);
}
"""


@functools.cache
def compiled_block_copy() -> Path:
    """Return a library that runs the kernel of gpu/kernels/copy.cu on the CPU: see `FakeCuda`."""
    require_compiler()
    text, command = _HOST + kernel_source(["copy.cu"]) + _LAUNCH, ["g++", "-O2", "-shared", "-fPIC", "-Wall"]

    def make(folder: Path) -> None:
        (folder / "copy.cpp").write_text(text)
        files = ["-o", str(folder / "copy.so"), str(folder / "copy.cpp")]
        subprocess.run([*command, *files], check=True, timeout=300)

    return build_once(make, text, " ".join(command)) / "copy.so"


class EmulatedTransport(CudaTransport):
    """`CudaTransport` over a fake `cuda`; source and sink may be in one process."""

    kernels: Kernels = "gathered"  # torch.compile for GPUs has its own test

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__("cuda:0")
        self.device = "cpu"
        self.cuda = cuda
        self._real, self._memory = self._memory, self  # type: ignore[assignment]

    def create(self, size: int, device: str) -> object:
        return self._real.create(size, "cuda:0", self.cuda)

    def open(self, reference: CudaReference, device: str) -> object:
        return self._real.open(from_elsewhere(reference), "cuda:0", self.cuda)

    def _compile(self) -> bytes:
        return bytes(compiled_block_copy())

    def source(
        self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float = LEASE_MS
    ) -> HandoverSource:
        made = super().source(name, leases=leases, kv_bytes=kv_bytes, epoch=epoch, lease_ms=lease_ms)
        address = made.memory.__cuda_array_interface__["data"][0]
        made.memory = memoryview((ctypes.c_uint8 * kv_bytes).from_address(address)).cast("B")
        return made
