"""The errors of `gpu`: one family. A message names the value, the limit, and what to do where that is not plain."""


class GpuError(Exception):
    """Base of everything that the search engine raises on purpose."""


class InvalidVector(GpuError, ValueError):
    """A vector has the wrong shape or type, or holds a NaN, an infinity or a value that the metric cannot bear."""


class InvalidParams(GpuError, ValueError):
    """A parameter of a build or a search is out of its range."""


class UnknownCollection(GpuError, KeyError):
    """No collection of that name is loaded in this engine."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote the message


class NoFreeSlot(GpuError):
    """Every slot of the running batch is taken. Nothing was admitted."""


class InvalidSlot(GpuError, LookupError):
    """The slot is not in the state that the call needs: free, still running, or out of range."""


class IndexFormatError(GpuError):
    """A directory is not an index that this version can read: missing, foreign, truncated or altered."""


class DeviceError(GpuError):
    """A call of the device's driver failed; the message has the call and the driver's own name for what went wrong."""


class DeviceUnavailable(DeviceError):
    """There is no such device here, no driver for it, or the packages that drive it are not installed."""


class OutOfDeviceMemory(DeviceError):
    """The device has less free memory than is needed. The message gives both, in bytes, and what was to be stored."""
