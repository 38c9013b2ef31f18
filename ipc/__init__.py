"""Memory that the processes of a node share: rings with doorbells and sessions, and the KV hand-over channel.

Independent of vector search and of language models. Linux only.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipc.client.client import RingClient
    from ipc.client.session import Memo
    from ipc.endpoints import bind, check_endpoint, connect, new_token, private_endpoint, receive_all, send_now
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
    )
    from ipc.handover.messages import Offer, Outcome
    from ipc.handover.sink import HandoverSink
    from ipc.handover.source import HandoverSource, KvArena
    from ipc.memory.device import DeviceSpan
    from ipc.memory.shared import MemoryReference, SharedMemory
    from ipc.ring.descriptors import STAGES, STATUSES, Result, SearchSpec, Stage
    from ipc.ring.ring import RingConsumer, RingLayout, RingProducer, format_ring
    from ipc.server.server import SessionServer
    from ipc.session.messages import Catalogue, Served, Unserved

# Loaded on first use: most of this is compiled code, or ZeroMQ, which a supervisor or a command never runs; and `gpu`
# imports `ipc.native` where nothing else of this is installed.
_HOME = {
    **dict.fromkeys(
        (
            "AttachRefused",
            "AttachTimeout",
            "Draining",
            "InvalidArgument",
            "IpcError",
            "MemoryRefused",
            "PeerLost",
            "ProtocolViolation",
            "RingFull",
            "StaleEpoch",
        ),
        "errors",
    ),
    **dict.fromkeys(("MemoryReference", "SharedMemory"), "memory.shared"),
    **dict.fromkeys(("STAGES", "STATUSES", "Result", "SearchSpec", "Stage"), "ring.descriptors"),
    "DeviceSpan": "memory.device",
    "HandoverSink": "handover.sink",
    "HandoverSource": "handover.source",
    "KvArena": "handover.source",
    "Memo": "client.session",
    "Offer": "handover.messages",
    "Outcome": "handover.messages",
    "RingClient": "client.client",
    "SessionServer": "server.server",
    **dict.fromkeys(("Catalogue", "Served", "Unserved"), "session.messages"),
    **dict.fromkeys(("RingConsumer", "RingLayout", "RingProducer", "format_ring"), "ring.ring"),
    **dict.fromkeys(
        ("bind", "check_endpoint", "connect", "new_token", "private_endpoint", "receive_all", "send_now"), "endpoints"
    ),
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
