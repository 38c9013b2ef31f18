"""Vector search on one device: the index, building it, and the engine that searches it by the extend."""

from gpu.backends import check_device, is_device_name, open_engine
from gpu.cpu.engine import CpuEngine
from gpu.engine import Engine
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
from gpu.index import GraphIndex
from gpu.params import SearchParams

__all__ = [
    "CpuEngine",
    "DeviceError",
    "DeviceUnavailable",
    "Engine",
    "GpuError",
    "GraphIndex",
    "IndexFormatError",
    "InvalidParams",
    "InvalidSlot",
    "InvalidVector",
    "NoFreeSlot",
    "OutOfDeviceMemory",
    "SearchParams",
    "UnknownCollection",
    "check_device",
    "is_device_name",
    "open_engine",
]
