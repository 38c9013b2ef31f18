"""Exceptions of `gpu`. Messages contain the value, the limit and, where it is not obvious, the remedy."""


class GpuError(Exception):
    """Base class of the search engine's errors."""


class InvalidVector(GpuError, ValueError):
    """A vector has the wrong shape or type, or contains a NaN, an infinity or a value out of range for the metric."""


class InvalidParams(GpuError, ValueError):
    """A parameter of a build or a search is out of its range."""


class UnknownCollection(GpuError, KeyError):
    """No collection of that name is loaded in this engine."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote the message


class NoFreeSlot(GpuError):
    """All slots of the running batch are in use; the query was not admitted."""


class InvalidSlot(GpuError, LookupError):
    """The slot is out of range or not in the required state."""


class IndexFormatError(GpuError):
    """A directory is not an index that this version can read: missing, of another format, truncated or corrupt."""


class DeviceError(GpuError):
    """A driver call failed; the message contains the call and the driver's error name."""


class DeviceUnavailable(DeviceError):
    """The device, its driver or the required Python packages are missing, or cannot be used."""


class OutOfDeviceMemory(DeviceError):
    """The device has too little free memory. The message contains required and free bytes by array."""
