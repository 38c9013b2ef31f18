"""Engine factory: map a device name to an engine. Packages of a device are imported only when it is used."""

from collections.abc import Mapping

from gpu.devices import CPU, check_device
from gpu.engine import Engine
from gpu.index.graph_index import GraphIndex


def open_engine(
    device: str,
    collections: Mapping[str, GraphIndex],
    *,
    slots: int = 32,
    max_top_m: int = 512,
    max_k: int | None = None,
    max_search_width: int = 8,
    resident: bool = False,
) -> Engine:
    """Open an engine over indexes on a device; see `CpuEngine` and `CudaEngine` for the limits.

    A launch on a GPU makes as many extends as possible, because where processes share it, each launch waits for its
    turn. resident: run a persistent kernel, on a GPU with no other compute work; falls back to launches where the
    device has no room for it.
    Raises DeviceUnavailable, OutOfDeviceMemory, InvalidParams.
    """
    check_device(device)
    if device == CPU:
        from gpu.cpu.engine import CpuEngine  # compiled when imported

        return CpuEngine(collections, slots=slots, max_top_m=max_top_m, max_k=max_k, max_search_width=max_search_width)
    from gpu.cuda.engine import MAX_EXTENDS_PER_LAUNCH, CudaEngine

    return CudaEngine.open(
        device,
        collections,
        slots=slots,
        max_top_m=max_top_m,
        max_k=max_k,
        max_search_width=max_search_width,
        extends_per_launch=MAX_EXTENDS_PER_LAUNCH,
        form="resident" if resident else None,
    )
