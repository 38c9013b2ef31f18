"""What every section works with: a device, an index, queries with their exact neighbours."""

import argparse
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.data import DataSet, data_sets, load, nearest
from benchmarks.common.machine import machine
from gpu import DeviceError, Engine, GraphIndex, SearchParams, check_device, open_engine

FloatArray = npt.NDArray[np.float32]

if TYPE_CHECKING:
    from gpu.cuda.engine import CudaEngine


@dataclass
class Setup:
    """`device` is "cpu" in a dry run. `small` asks for tiny amounts of everything."""

    device: str
    device_name: str
    data: DataSet
    index: GraphIndex
    params: SearchParams
    slots: int
    small: bool
    machine: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def file_name(self) -> str:
        """The device's name as a part of a file name."""
        name = "dry-run" if self.small else self.device_name
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

    def engine(self, slots: int | None = None) -> Engine:
        """An engine over the index as "docs", as it ships."""
        return open_engine(self.device, {"docs": self.index}, slots=slots or self.slots, max_top_m=512)

    def cuda_engine(self, slots: int | None = None, **options: Any) -> "CudaEngine":
        """The same on a GPU, with `CudaEngine`'s own options."""
        from gpu.cuda.engine import CudaEngine

        return CudaEngine.open(self.device, {"docs": self.index}, slots=slots or self.slots, max_top_m=512, **options)


def prepare(options: argparse.Namespace) -> Setup:
    """Read or make data and index. Raises DeviceUnavailable for a device that is not there."""
    device = "cpu" if options.dry_run else options.device
    check_device(device)
    name, where = "CPU", machine()
    if device != "cpu":
        from gpu.cuda.cuda_driver import CudaDriver

        driver = CudaDriver(device)
        name = driver.name
        where["gpu"] = f"{name}, {driver.memory()[1] / 2**30:.0f} GiB, {driver.multiprocessors} SMs, {driver.arch}"
        driver.close()
    data = _data(options)
    index = _index(options, data, device)
    settings = {
        "set": data.name,
        "vectors": index.size,
        "dimensions": index.dim,
        "dtype": index.dtype,
        "degree": index.degree,
        "top_m": options.top_m,
        "slots": 16 if options.dry_run else options.slots,
    }
    params = SearchParams(10, options.top_m, 4)
    return Setup(device, name, data, index, params, settings["slots"], options.dry_run, where, settings)


def random_set(rows: int, dim: int, queries: int, seed: int) -> DataSet:
    """Gaussian clusters of low intrinsic dimension, l2, with exact neighbours."""
    random = np.random.default_rng(seed)
    basis = random.standard_normal((12, dim))
    centres = random.standard_normal((30, 12)) * 2

    def draw(count: int) -> FloatArray:
        points = centres[random.integers(30, size=count)] + random.standard_normal((count, 12))
        return (points @ basis + 0.3 * random.standard_normal((count, dim))).astype(np.float32)

    base, asked = draw(rows), draw(queries)
    return DataSet(f"random-{dim}-l2", "l2", base, asked, nearest(base, asked, 10))


def _data(options: argparse.Namespace) -> DataSet:
    if options.dry_run:
        return random_set(1500, 32, 100, 0)
    if options.data is None:
        return random_set(100_000, 96, 2000, 0)
    names = data_sets(options.data)
    name = options.set or names[0]
    if name not in names:
        raise SystemExit(f"--set {name}: {options.data} has {', '.join(names)}")
    return load(options.data, name, options.rows)


def _index(options: argparse.Namespace, data: DataSet, device: str) -> GraphIndex:
    if options.index is not None and not options.dry_run:
        return GraphIndex.load(options.index)
    build: dict[str, Any] = {"metric": data.metric, "dtype": options.dtype}
    if device != "cpu":
        try:
            return GraphIndex.build(data.base, **build, device="cuda")
        except DeviceError as error:  # no cuVS, or one that fails: the run goes on
            print(f"the index is built on the CPU: {error}", flush=True)
    return GraphIndex.build(data.base, **build, threads=1 if options.dry_run else 16)
