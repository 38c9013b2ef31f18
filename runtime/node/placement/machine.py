"""The machine on which a node is laid out: GPUs, cores by NUMA node, memory; or a simulated one."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from runtime.errors import ConfigError, InvalidRequest
from runtime.node.placement.gpus import Gpu, Gpus

SYSTEM_NODES = Path("/sys/devices/system/node")
MAX_SIMULATED = 8


@dataclass(frozen=True)
class Machine:
    """GPUs, cores and memory. `cores`: those that this process may use; `node_cores`: the same by NUMA node, empty if
    the system does not report them.

    A `simulated` machine has GPUs in name only: workers placed on them run on the CPU.
    """

    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]
    free_bytes: int
    node_cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    simulated: bool = False
    missing: str = ""  # why there are no GPUs

    @classmethod
    def read(cls, gpus: Gpus | None = None, system: Path = SYSTEM_NODES) -> Self:
        """Read this machine's properties."""
        gpus = gpus or Gpus()
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return cls(
            gpus=tuple(gpus.all()),
            cores=cores,
            free_bytes=int(psutil.virtual_memory().available),
            node_cores=_node_cores(system, set(cores)),
            missing=gpus.missing,
        )

    @classmethod
    def with_simulated_gpus(cls, count: int) -> Self:
        """Return this machine with `count` simulated GPUs, "cuda:0" and so on. Raises `ConfigError`."""
        if not 1 <= count <= MAX_SIMULATED:
            raise ConfigError(f"cannot simulate {count} GPUs: 1 to {MAX_SIMULATED}")
        free = int(psutil.virtual_memory().available)
        names = [Gpu(str(n), f"SIM-{n}", "simulated", "–", free, free) for n in range(count)]
        return cls(tuple(names), tuple(sorted(os.sched_getaffinity(0))), free, simulated=True)

    def find(self, device: str, key: str) -> Gpu:
        """Return the GPU with that name, the value of a key. Raises `ConfigError`, which lists the available ones."""
        matching = [gpu for gpu in self.gpus if gpu.matches(device)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise ConfigError(
                f"{key}: {device!r} matches {len(matching)} GPUs: {', '.join(gpu.uuid for gpu in matching)}"
            )
        available = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in self.gpus)
        missing = f"none ({self.missing})" if self.missing else "none"
        raise ConfigError(f"{key}: {device!r} is not a GPU of this machine; available: {available or missing}")


def check_host_memory(needed_bytes: int, whose: str) -> None:
    """Raise `InvalidRequest` if the host has less memory free."""
    free = int(psutil.virtual_memory().available)
    if free < needed_bytes:
        raise InvalidRequest(
            f"the host has {free / 2**30:.1f} GiB free, but {whose} needs {needed_bytes / 2**30:.1f} GiB"
        )


def _node_cores(system: Path, allowed: set[int]) -> dict[int, tuple[int, ...]]:
    by_node = {}
    for path in sorted(system.glob("node[0-9]*/cpulist")):
        try:
            cores = parse_cores(path.read_text())
        except (OSError, ValueError):
            continue
        if usable := tuple(sorted(cores & allowed)):
            by_node[int(path.parent.name.removeprefix("node"))] = usable
    return by_node


def parse_cores(text: str) -> set[int]:
    """Parse a core list in the kernel's format, such as "0-3,8". Raises `ValueError`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores
