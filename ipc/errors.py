"""Errors of `ipc`. Messages contain the value and the limit."""

import msgspec

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised by decoding bytes that are no valid message: msgspec's own, and Python's for bad UTF-8 and deep nesting."""


class IpcError(Exception):
    """Base class of errors raised by `ipc`."""


class RingFull(IpcError):
    """No free slot; nothing was sent. Read results or wait, then retry."""


class Draining(IpcError):
    """The peer finishes outstanding requests and accepts no new ones."""


class PeerLost(IpcError):
    """The peer died, closed or ended the session; outstanding requests end with status 'lost'."""


class AttachTimeout(PeerLost):
    """No answer from the endpoint before the timeout."""


class AttachRefused(IpcError):
    """The peer refused the session; the message is its reason."""


class StaleEpoch(IpcError):
    """A request, result or hand-over belongs to another epoch: its process has been restarted."""


class ProtocolViolation(IpcError):
    """The peer wrote invalid data: a foreign header, a position or size out of bounds."""


class MemoryRefused(IpcError):
    """Shared memory cannot be opened: gone, unsealed, not of the announced size, or over the limit."""


class InvalidArgument(IpcError, ValueError):
    """The caller passed a value that is out of range."""
