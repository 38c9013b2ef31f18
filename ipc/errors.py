"""The errors of `ipc`: one family. Messages name the value and the limit."""

import msgspec

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding bytes raises that are no message: of msgspec's own, and for bad UTF-8 and too deep nesting Python's."""


class IpcError(Exception):
    """Base of everything that `ipc` raises on purpose."""


class RingFull(IpcError):
    """No free slot: nothing was accepted. Read results (or wait) and try again."""


class Draining(IpcError):
    """The peer finishes what it has and takes nothing new."""


class PeerLost(IpcError):
    """The peer died, closed the session, or put an end to it; its outstanding requests end with status 'lost'."""


class AttachTimeout(PeerLost):
    """Nobody answered at the endpoint in time."""


class AttachRefused(IpcError):
    """The peer answered, and declined; the message is its reason."""


class StaleEpoch(IpcError):
    """A request, result or hand-over belongs to another life of its process."""


class ProtocolViolation(IpcError):
    """The peer wrote what no correct peer writes: a foreign header, a position or size out of bounds."""


class MemoryRefused(IpcError):
    """Shared memory cannot be opened: gone, unsealed, of another size than announced, or over the limit."""


class InvalidArgument(IpcError, ValueError):
    """The caller passed a value out of its range."""
