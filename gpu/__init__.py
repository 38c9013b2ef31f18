"""Vector search on one device: the graph index, its build, and engines that search it in batched extends."""

import importlib
from typing import TYPE_CHECKING

from gpu.devices import check_device, is_device_name
from gpu.errors import (
    DeviceError,
    DeviceUnavailable,
    GpuError,
    IndexFormatError,
    InvalidParams,
    InvalidSlot,
    InvalidVector,
    NoFreeSlot,
    OutOfDeviceMemory,
    UnknownCollection,
)
from gpu.params import SearchParams

if TYPE_CHECKING:
    from gpu.backends import open_engine
    from gpu.cpu.engine import CpuEngine
    from gpu.engine import Engine
    from gpu.index.graph_index import GraphIndex

# Imported on first use: engines import compiled code, which only pool workers run.
_HOME = {"CpuEngine": "cpu.engine", "Engine": "engine", "GraphIndex": "index.graph_index", "open_engine": "backends"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
