"""The machine's GPUs, read from NVIDIA's management library (NVML): properties, and current load.

Without a driver or the package `nvidia-ml-py` there are no GPUs, and `missing` has the reason.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import InvalidRequest
from runtime.node.supervisor_metrics import Family, GpuMetrics, SupervisorMetric

SYSTEM_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Gpu:
    """A GPU or a MIG instance. `numa_node` is None if the system does not report it.

    `index` is NVML's (PCI order); "0:1" is instance 1 of GPU 0; `pci_bus` is like "0000:17:00.0"; `arch` is what
    kernels are compiled for, like "sm_90".
    """

    index: str
    uuid: str
    name: str
    pci_bus: str
    memory_bytes: int
    free_bytes: int
    numa_node: int | None = None
    arch: str = ""

    @property
    def is_mig(self) -> bool:
        return ":" in self.index

    def matches(self, name: str) -> bool:
        """Whether `name` denotes it: an index, "cuda:INDEX", or a UUID or its prefix of at least 8 characters."""
        return name.removeprefix("cuda:") == self.index or (len(name) >= 8 and self.uuid.startswith(name))


class Gpus:
    """All GPUs that NVML reports; `missing` is the reason if there are none, "" if NVML works."""

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
        """Return every GPU, each followed by its MIG instances, with its free memory."""
        return [self._describe(index, handle, parent) for index, handle, parent in self._handles]

    def check_free(self, uuid: str, needed_bytes: int, whose: str) -> None:
        """Raise `InvalidRequest` if this GPU has less memory free. A GPU that NVML does not report is not checked."""
        for index, handle, _ in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):  # the GPU has failed
                free = self._nvml.nvmlDeviceGetMemoryInfo(handle).free
                if self._uuid(handle) == uuid and free < needed_bytes:
                    raise InvalidRequest(
                        f"GPU {index} ({uuid}) has {free / 2**30:.1f} GiB free, but {whose} needs "
                        f"{needed_bytes / 2**30:.1f} GiB"
                    )

    def driver(self) -> str:
        """Return the driver's version, "" without a driver."""
        return str(self._nvml.nvmlSystemGetDriverVersion()) if self._nvml else ""

    def peers(self, one: str, other: str) -> bool:
        """Whether two whole GPUs, by index, can access each other's memory directly."""
        handles = {index: handle for index, handle, _ in self._handles}
        kind = self._nvml.NVML_P2P_CAPS_INDEX_READ
        status = self._nvml.nvmlDeviceGetP2PStatus(handles[one], handles[other], kind)
        return bool(status == self._nvml.NVML_P2P_STATUS_OK)

    def families(self) -> Iterator[Family]:
        """Yield Prometheus families; without NVML only `NVML_UP`. Metrics that a GPU does not support are omitted."""
        reason = "" if self._nvml else self.missing
        yield GpuMetrics.NVML_UP.of({reason: not reason})
        for metric, read in self._metrics():
            values: dict[tuple[str, ...], float] = {}
            for index, handle, _ in self._handles:
                with contextlib.suppress(self._nvml.NVMLError):  # not supported by this GPU or instance
                    values[index, self._uuid(handle)] = read(handle)
            if values:
                yield metric.of(values)

    def _metrics(self) -> Sequence[tuple[SupervisorMetric, Callable[[Any], float]]]:
        if (nvml := self._nvml) is None:
            return ()
        return (
            (GpuMetrics.MEMORY, lambda h: nvml.nvmlDeviceGetMemoryInfo(h).total),
            (GpuMetrics.MEMORY_USED, lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used),
            (GpuMetrics.BUSY, lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100),
            (GpuMetrics.MEMORY_BUSY, lambda h: nvml.nvmlDeviceGetUtilizationRates(h).memory / 100),
            (GpuMetrics.POWER, lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000),
        )

    def _enumerate(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield index, handle, and the handle of the GPU to which it belongs."""
        if (nvml := self._nvml) is None:
            return
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield str(index), handle, handle
            with contextlib.suppress(nvml.NVMLError):  # a GPU without MIG support
                if not nvml.nvmlDeviceGetMigMode(handle)[0]:
                    continue
                for instance in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                    with contextlib.suppress(nvml.NVMLError_NotFound):
                        yield f"{index}:{instance}", nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance), handle

    def _describe(self, index: str, handle: Any, parent: Any) -> Gpu:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        bus = _bus(self._nvml.nvmlDeviceGetPciInfo(parent).busId)
        major, minor = self._nvml.nvmlDeviceGetCudaComputeCapability(parent)
        return Gpu(
            index=index,
            uuid=self._uuid(handle),
            name=self._nvml.nvmlDeviceGetName(handle),
            pci_bus=bus,
            memory_bytes=int(memory.total),
            free_bytes=int(memory.free),
            numa_node=numa_node_of(bus, self._system),
            arch=f"sm_{major}{minor}",
        )

    def _uuid(self, handle: Any) -> str:
        return str(self._nvml.nvmlDeviceGetUUID(handle))


def numa_node_of(pci_bus: str, system: Path = SYSTEM_PCI) -> int | None:
    """Return the NUMA node of a PCI device; None if the system does not report it (also as "-1")."""
    try:
        node = int((system / pci_bus / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _bus(nvml_bus: str) -> str:
    """Convert NVML's "00000000:17:00.0" to the system's "0000:17:00.0"."""
    domain, _, rest = nvml_bus.partition(":")
    return f"{domain[-4:]}:{rest}".lower()
