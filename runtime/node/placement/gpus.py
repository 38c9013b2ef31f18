"""The GPUs of this machine, as NVIDIA's management library (NVML) tells: what they are, and how busy they are now.

A machine without a driver, or without the package `nvidia-ml-py`, has no GPUs here and a reason why.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.node.supervisor_metrics import GpuMetrics, SupervisorMetric

if TYPE_CHECKING:
    from runtime.node.supervisor_metrics import Family

SYSTEM_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance of one. `numa_node` is None where the system does not say.

    `index` is NVML's (PCI order), "0" or "0:1" for an instance of GPU 0; `pci_bus` like "0000:17:00.0".
    """

    index: str
    uuid: str
    name: str
    pci_bus: str
    memory_bytes: int
    free_bytes: int
    numa_node: int | None = None

    @property
    def is_mig(self) -> bool:
        return ":" in self.index

    def called(self, name: str) -> bool:
        """Whether `name`, an index, "cuda:INDEX", a UUID or the beginning of one (8 characters or more), means it."""
        return name.removeprefix("cuda:") == self.index or (len(name) >= 8 and self.uuid.startswith(name))


class Gpus:
    """All GPUs that NVML sees; `missing` says why it sees none ("" if it works)."""

    def __init__(self, library: Any | None = None, system: Path = SYSTEM_PCI) -> None:
        self._system = system
        self.missing = ""
        try:
            self._nvml = importlib.import_module("pynvml") if library is None else library
            self._nvml.nvmlInit()
        except ImportError:
            self._nvml, self.missing = None, "the package nvidia-ml-py is not installed"
        except self._nvml.NVMLError as error:
            self._nvml, self.missing = None, f"NVML: {error}"
        self._handles = list(self._enumerate())

    def all(self) -> list[Gpu]:
        """Every GPU, and every MIG instance after the GPU that it is cut from, with its free memory now."""
        return [self._describe(index, handle, parent) for index, handle, parent in self._handles]

    def driver(self) -> str:
        """The driver's version; "" without one."""
        return str(self._nvml.nvmlSystemGetDriverVersion()) if self._nvml else ""

    def peers(self, one: str, other: str) -> bool:
        """Whether two whole GPUs (by index) can reach each other's memory directly."""
        handles = {index: handle for index, handle, _ in self._handles}
        kind = self._nvml.NVML_P2P_CAPS_INDEX_READ
        status = self._nvml.nvmlDeviceGetP2PStatus(handles[one], handles[other], kind)
        return bool(status == self._nvml.NVML_P2P_STATUS_OK)

    def families(self) -> "Iterator[Family]":
        """What Prometheus sees; without NVML only that it is not there. A figure that a GPU lacks is left out."""
        reason = "" if self._nvml else self.missing
        yield GpuMetrics.NVML_UP.of({reason: not reason})
        for figure, read in self._figures():
            found: dict[tuple[str, ...], float] = {}
            for index, handle, _ in self._handles:
                with contextlib.suppress(self._nvml.NVMLError):  # not supported by this GPU, or by an instance
                    found[index, self._uuid(handle)] = read(handle)
            if found:
                yield figure.of(found)

    def _figures(self) -> Sequence[tuple[SupervisorMetric, Callable[[Any], float]]]:
        if (nvml := self._nvml) is None:
            return ()
        return (
            (GpuMetrics.MEMORY, lambda h: nvml.nvmlDeviceGetMemoryInfo(h).total),
            (GpuMetrics.MEMORY_USED, lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used),
            (GpuMetrics.BUSY, lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100),
            (GpuMetrics.MEMORY_BUSY, lambda h: nvml.nvmlDeviceGetUtilizationRates(h).memory / 100),
            (GpuMetrics.POWER, lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000),
            (GpuMetrics.TEMPERATURE, lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),
        )

    def _enumerate(self) -> Iterator[tuple[str, Any, Any]]:
        """Index, handle, and the handle of the GPU whose PCI device it is."""
        if (nvml := self._nvml) is None:
            return
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield str(index), handle, handle
            with contextlib.suppress(nvml.NVMLError):  # a GPU that knows no MIG
                if not nvml.nvmlDeviceGetMigMode(handle)[0]:
                    continue
                for instance in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                    with contextlib.suppress(nvml.NVMLError_NotFound):
                        yield f"{index}:{instance}", nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance), handle

    def _describe(self, index: str, handle: Any, parent: Any) -> Gpu:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        bus = _bus(self._nvml.nvmlDeviceGetPciInfo(parent).busId)
        return Gpu(
            index=index,
            uuid=self._uuid(handle),
            name=self._nvml.nvmlDeviceGetName(handle),
            pci_bus=bus,
            memory_bytes=int(memory.total),
            free_bytes=int(memory.free),
            numa_node=numa_node_of(bus, self._system),
        )

    def _uuid(self, handle: Any) -> str:
        return str(self._nvml.nvmlDeviceGetUUID(handle))


def numa_node_of(pci_bus: str, system: Path = SYSTEM_PCI) -> int | None:
    """The NUMA node of a PCI device; None if the system does not say (its "-1" means that too)."""
    try:
        node = int((system / pci_bus / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _bus(nvml_bus: str) -> str:
    """NVML's "00000000:17:00.0" as the system spells it: "0000:17:00.0"."""
    domain, _, rest = nvml_bus.partition(":")
    return f"{domain[-4:]}:{rest}".lower()
