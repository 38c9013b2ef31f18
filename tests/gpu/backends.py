"""Backends of the contract suite: the CPU engine, and the CUDA engine in each launch form on an emulated device and, if
there is one, on a real device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from gpu import CpuEngine, Engine, GraphIndex
from gpu.cuda.compiler import compile_kernels
from gpu.cuda.driver import Driver
from gpu.cuda.engine import CudaEngine
from gpu.cuda.graphs import LaunchForm
from gpu.errors import DeviceUnavailable
from tests.cuda.emulation import LOOK_NS, EmulatedDriver, emulator

FORMS: tuple[LaunchForm, ...] = ("plain", "loop", "resident")


@dataclass(frozen=True)
class Backend:
    """An engine type. `sums_as_search`: its distances are bitwise equal to those of `GraphIndex.search`."""

    device: str
    form: LaunchForm = "plain"

    @property
    def sums_as_search(self) -> bool:
        return self.device == "cpu"

    @contextmanager
    def engine(self, collections: Mapping[str, GraphIndex], **limits: int) -> Iterator[Engine]:
        """Yield an engine. Leaving the context raises DeviceError for a fault that no call has reported."""
        if self.device == "cpu":
            yield CpuEngine(collections, **limits)
            return
        driver, image = self._device()
        if self.device == "emulated":
            limits = {"fault_poll_ns": LOOK_NS, **limits}
        try:
            engine = CudaEngine(driver, image, collections, form=self.form, **limits)
            assert set(engine.forms.values()) == {self.form}
            yield engine
            engine.close()
        finally:
            driver.close()

    def _device(self) -> tuple[Driver, bytes]:
        if self.device == "emulated":
            return EmulatedDriver(emulator(), block_threads=64), b""
        from gpu.cuda.cuda_driver import CudaDriver

        driver = CudaDriver(self.device)
        return driver, compile_kernels(driver.arch)

    def __str__(self) -> str:
        return self.device if self.device == "cpu" else f"{self.device}-{self.form}"


def _real_device() -> bool:
    try:
        from gpu.cuda.cuda_driver import device_count

        return device_count() > 0
    except DeviceUnavailable:
        return False


DEVICES = ("emulated", "cuda") if _real_device() else ("emulated",)
BACKENDS = (Backend("cpu"), *(Backend(device, form) for device in DEVICES for form in FORMS))
