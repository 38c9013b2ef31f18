"""Memory that the processes of a node share: rings with doorbells and sessions, and the KV hand-over channel.

Knows nothing of what vectors mean, of search, or of language models. Linux only.
"""

import importlib
from typing import TYPE_CHECKING

from ipc.descriptors import STAGES, STATUSES, Cancel, Parameters, Request, Result, Stage
from ipc.errors import (
    AttachRefused,
    AttachTimeout,
    Draining,
    InvalidArgument,
    IpcError,
    MemoryRefused,
    PeerLost,
    ProtocolViolation,
    RingFull,
    StaleEpoch,
    UnknownRequest,
)
from ipc.memo import Memo
from ipc.memory import MemoryReference, SharedMemory
from ipc.statistics import ClientStatistics, ServerStatistics

if TYPE_CHECKING:
    from ipc.arena import KvArena
    from ipc.client import RingClient
    from ipc.device_memory import DeviceSpan
    from ipc.endpoints import bind, check_endpoint, connect, new_token, private_endpoint, receive_all, send_now
    from ipc.handover import Offer, Outcome
    from ipc.handover_sink import HandoverSink
    from ipc.handover_source import HandoverSource
    from ipc.ring import RingConsumer, RingLayout, RingProducer, format_ring
    from ipc.ring_server import RingServer
    from ipc.server import SessionServer
    from ipc.session import Catalogue, Served, Unserved

# Loaded on first use: most of this is compiled code, or ZeroMQ, which a supervisor or a command never runs.
_HOME = {
    "DeviceSpan": "device_memory",
    "HandoverSink": "handover_sink",
    "HandoverSource": "handover_source",
    "KvArena": "arena",
    "Offer": "handover",
    "Outcome": "handover",
    "RingClient": "client",
    "RingServer": "ring_server",
    "SessionServer": "server",
    **dict.fromkeys(("Catalogue", "Served", "Unserved"), "session"),
    **dict.fromkeys(("RingConsumer", "RingLayout", "RingProducer", "format_ring"), "ring"),
    **dict.fromkeys(
        ("bind", "check_endpoint", "connect", "new_token", "private_endpoint", "receive_all", "send_now"), "endpoints"
    ),
}

__all__ = [
    "STAGES",
    "STATUSES",
    "AttachRefused",
    "AttachTimeout",
    "Cancel",
    "Catalogue",
    "ClientStatistics",
    "DeviceSpan",
    "Draining",
    "HandoverSink",
    "HandoverSource",
    "InvalidArgument",
    "IpcError",
    "KvArena",
    "Memo",
    "MemoryReference",
    "MemoryRefused",
    "Offer",
    "Outcome",
    "Parameters",
    "PeerLost",
    "ProtocolViolation",
    "Request",
    "Result",
    "RingClient",
    "RingConsumer",
    "RingFull",
    "RingLayout",
    "RingProducer",
    "RingServer",
    "Served",
    "ServerStatistics",
    "SessionServer",
    "SharedMemory",
    "Stage",
    "StaleEpoch",
    "UnknownRequest",
    "Unserved",
    "bind",
    "check_endpoint",
    "connect",
    "format_ring",
    "new_token",
    "private_endpoint",
    "receive_all",
    "send_now",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return found
