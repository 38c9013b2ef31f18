"""Inputs of the sections: device, index, queries with their exact neighbours."""

import argparse
import importlib.metadata
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.data import DataSet, data_sets
from benchmarks.common.machine import machine
from benchmarks.gpu_check.time_limit import Skipped
from gpu import Engine, GraphIndex, SearchParams, check_device, open_engine
from runtime.node.placement.gpus import Gpus

if TYPE_CHECKING:
    from gpu.cuda.engine import CudaEngine

_DIMS, SMALL_DIMS = (96, 768), (32, 48)
_ROWS, _SMALL_ROWS = 1_000_000, 900
DEFAULT_TOP_M = 64
_PACKAGES = {
    "CUDA runtime": "nvidia-cuda-runtime",
    "NVRTC": "nvidia-cuda-nvrtc",
    "torch": "torch",
    "cuVS": "cuvs-cu13",
    "cuda-bindings": "cuda-bindings",
    "cuda-core": "cuda-core",
    "numpy": "numpy",
    "numba": "numba",
}


@dataclass(frozen=True)
class Source:
    """Source of a data set: a directory and a name, or the dimensions of a synthetic set."""

    name: str
    dim: int = 0
    directory: Path | None = None
    index: Path | None = None
    rows: int | None = None


@dataclass
class Setup:
    """Inputs for one data set. device: "cpu" in a dry run. small: use tiny sizes. Data, index and `params` (for the
    target recall) are set by the section "data"; `offered_per_s`, the arrival rate, by "cuvs" (0 before)."""

    device: str
    device_name: str
    source: Source
    dtype: str
    top_m: int
    slots: int
    small: bool
    machine: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    params: SearchParams = field(default_factory=lambda: SearchParams(10, DEFAULT_TOP_M, 4))
    given: tuple[DataSet, GraphIndex] | None = None
    offered_per_s: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def data(self) -> DataSet:
        """The data set. Raises Skipped if there is none."""
        return self._given()[0]

    @property
    def index(self) -> GraphIndex:
        """The index. Raises Skipped if there is none."""
        return self._given()[1]

    def _given(self) -> tuple[DataSet, GraphIndex]:
        if self.given is None:
            raise Skipped(f"no index of {self.source.name}: see the section data")
        return self.given

    @property
    def file_name(self) -> str:
        """The device's name for file names."""
        name = "dry-run" if self.small else self.device_name
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

    def engine(self, slots: int | None = None) -> Engine:
        """Open an engine over the index, as "docs", with default options."""
        return open_engine(self.device, {"docs": self.index}, slots=slots or self.slots, max_top_m=512)

    def cuda_engine(self, slots: int | None = None, **options: Any) -> "CudaEngine":
        """Open a `CudaEngine` over the index, as "docs"."""
        from gpu.cuda.engine import CudaEngine

        return CudaEngine.open(self.device, {"docs": self.index}, slots=slots or self.slots, max_top_m=512, **options)


def prepare(options: argparse.Namespace) -> list[Setup]:
    """Return a setup for each data set, without its data. Raises DeviceUnavailable for a missing device."""
    device = "cpu" if options.dry_run else options.device
    check_device(device)
    name, where = "CPU", machine() | versions()
    if device != "cpu":
        from gpu.cuda.cuda_driver import CudaDriver

        driver = CudaDriver(device)
        name = driver.name
        where["gpu"] = f"{name}, {driver.memory()[1] / 2**30:.0f} GiB, {driver.multiprocessors} SMs, {driver.arch}"
        driver.close()
    slots = 16 if options.dry_run else options.slots
    return [
        Setup(device, name, source, options.dtype, options.top_m, slots, options.dry_run, where)
        for source in _sources(options)
    ]


def versions() -> dict[str, str]:
    """Return the versions of the driver and of the packages that results depend on, by name."""
    gpus = Gpus()
    return {"driver": gpus.driver() or gpus.missing} | {name: _version(package) for name, package in _PACKAGES.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sources(options: argparse.Namespace) -> list[Source]:
    if options.data is None or options.dry_run:
        dims, rows = (SMALL_DIMS, _SMALL_ROWS) if options.dry_run else (_DIMS, options.rows or _ROWS)
        return [Source(f"{dim} dims", dim, rows=rows) for dim in dims]
    names = data_sets(options.data)
    name = options.set or names[0]
    if name not in names:
        raise SystemExit(f"--set {name}: {options.data} has {', '.join(names)}")
    return [Source(name, directory=options.data, index=options.index, rows=options.rows)]
