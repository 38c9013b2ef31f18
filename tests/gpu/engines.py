"""The engines that the contract suite runs against: the CPU's, the CUDA engine over an emulated device in each of its
forms, and over a real one where there is one."""

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

FORMS: tuple[LaunchForm, ...] = ("plain", "loop", "fused", "resident")


@dataclass(frozen=True)
class Backend:
    """One kind of engine. `sums_as_search`: its distances are, to the last bit, those of `GraphIndex.search`."""

    device: str
    form: LaunchForm = "plain"

    @property
    def sums_as_search(self) -> bool:
        return self.device == "cpu"

    @contextmanager
    def engine(self, collections: Mapping[str, GraphIndex], **limits: int) -> Iterator[Engine]:
        """An engine; leaving raises DeviceError for a fault that no call has told of."""
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
