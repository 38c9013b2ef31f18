"""Emulated GPU for prefill and decode: the GPU code path over CPU tensors and a fake driver."""

import ctypes

from ipc import HandoverSource
from ipc.memory.device import CudaReference
from runtime.serving.kv.transport import CudaTransport
from runtime.serving.model.model_info import Kernels
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere


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

    def source(self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float) -> HandoverSource:
        made = super().source(name, leases=leases, kv_bytes=kv_bytes, epoch=epoch, lease_ms=lease_ms)
        address = made.memory.__cuda_array_interface__["data"][0]
        made.memory = memoryview((ctypes.c_uint8 * kv_bytes).from_address(address)).cast("B")
        return made
