"""Vector search on one device: the index, building it, and the engine that searches it by the extend."""

from gpu.cpu.engine import CpuEngine
from gpu.engine import Engine
from gpu.errors import (
    GpuError,
    IndexFormatError,
    InvalidParams,
    InvalidSlot,
    InvalidVector,
    NoFreeSlot,
    UnknownCollection,
)
from gpu.index import GraphIndex
from gpu.params import SearchParams

__all__ = [
    "CpuEngine",
    "Engine",
    "GpuError",
    "GraphIndex",
    "IndexFormatError",
    "InvalidParams",
    "InvalidSlot",
    "InvalidVector",
    "NoFreeSlot",
    "SearchParams",
    "UnknownCollection",
]
