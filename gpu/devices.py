"""Device names. "cpu" is always available; "cuda", "cuda:N" and a GPU's UUID ("GPU-…") need the extra [cuda], a driver
and that GPU."""

import re

from gpu.errors import DeviceUnavailable

CPU = "cpu"
_CUDA = re.compile(r"cuda(:\d{1,3})?\Z|GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")


def is_device_name(device: str) -> bool:
    """Return whether the name is well-formed; `check_device` checks that the device exists."""
    return device == CPU or _CUDA.match(device) is not None


def check_device(device: str) -> None:
    """Raise DeviceUnavailable, with the reason, unless a search engine can be opened on the device."""
    if not is_device_name(device):
        raise DeviceUnavailable(f'{device!r} is not a device name; use "cpu", "cuda:N" or a UUID ("GPU-…")')
    if device != CPU:
        from gpu.cuda.cuda_driver import find_device

        find_device(device)
