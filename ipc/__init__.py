"""Memory that the processes of a node share: rings with doorbells and sessions, and the KV hand-over channel.

Knows nothing of what vectors mean, of search, or of language models. Linux only.
"""

from ipc.arena import KvArena
from ipc.client import RingClient
from ipc.descriptors import STAGES, STATUSES, Cancel, Parameters, Request, Result, Stage
from ipc.device_memory import DeviceSpan
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
    UnknownRequest,
)
from ipc.handover import Offer, Outcome
from ipc.handover_sink import HandoverSink
from ipc.handover_source import HandoverSource
from ipc.memo import Memo
from ipc.memory import MemoryReference, SharedMemory
from ipc.ring import RingConsumer, RingLayout, RingProducer, format_ring
from ipc.ring_server import RingServer
from ipc.server import SessionServer
from ipc.session import Catalogue, Served, Unserved
from ipc.statistics import ClientStatistics, ServerStatistics

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
