"""What client and pool say over ZeroMQ to open a session. Everything after that goes through the rings."""

import msgspec

from ipc.errors import InvalidArgument
from ipc.memory.device import CudaReference, Reference
from ipc.memory.shared import MemoryReference, Pid
from ipc.ring.filters import FILTERS_BYTES
from ipc.ring.ring import RingLayout
from ipc.session.device_arena import Lease

VERSION = 5
_PAGE = 4096
MAX_MESSAGE_BYTES = 1 << 19

EVENTFD, ZEROMQ = "eventfd", "zeromq"
DOORBELLS = (EVENTFD, ZEROMQ)


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A client asks for rings, and maybe for slots of the arena of query vectors.

    `bell` is its FdMailbox's name (eventfd) or its doorbell's endpoint (zeromq).
    """

    version: int
    name: str
    pid: Pid
    doorbell: str
    bell: str
    arena: bool = False


MAX_IDENTITY = 128
MAX_REASON = 500


class Served(msgspec.Struct, frozen=True):
    """A collection that a pool serves: its vectors' dimension, and which of its `shards` this pool has.

    `identity` names its content: ids of an answer are those of this content and no other. `attributes`: what a filter
    may name, and of which kind each is; `demanded`: the one that every filter must bind, or "". Raises
    `InvalidArgument`.
    """

    name: str
    dim: int
    shard: int = 0
    shards: int = 1
    identity: str = ""
    attributes: dict[str, str] = {}
    demanded: str = ""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise InvalidArgument(f"collection {self.name!r} has dimension {self.dim}, 1 is the least")
        if not 0 <= self.shard < self.shards:
            raise InvalidArgument(f"collection {self.name!r} has no shard {self.shard} of {self.shards}")
        if len(self.identity) > MAX_IDENTITY:
            raise InvalidArgument(f"an identity has at most {MAX_IDENTITY} characters, got {len(self.identity)}")


class Unserved(msgspec.Struct, frozen=True):
    """A collection that a pool would serve if it could, and why it cannot. Raises `InvalidArgument`."""

    name: str
    reason: str

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_REASON:
            raise InvalidArgument(f"a reason has at most {MAX_REASON} characters, got {len(self.reason)}")


class Catalogue(msgspec.Struct, frozen=True):
    """What a pool offers; a session keeps the one it was opened with.

    Raises `InvalidArgument` for a name used twice, or none.
    """

    served: tuple[Served, ...]
    unserved: tuple[Unserved, ...] = ()

    def __post_init__(self) -> None:
        names = [*(one.name for one in self.served), *(one.name for one in self.unserved)]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument(f"at least one collection, each with a name of its own; got {names}")

    @property
    def max_dim(self) -> int:
        """Of the longest vector; 1 if nothing is served."""
        return max((served.dim for served in self.served), default=1)


class Grant(msgspec.Struct, frozen=True):
    """Slots of the pool's arena of query vectors for this client. The arena lies in `host` or in `gpu` memory."""

    lease: Lease
    host: MemoryReference | None = None
    gpu: CudaReference | None = None

    def __post_init__(self) -> None:
        if (self.host is None) == (self.gpu is None):
            raise InvalidArgument("an arena lies in host memory or in a GPU's: one of both")

    @property
    def memory(self) -> Reference:
        """Where the arena lies."""
        found = self.host or self.gpu
        assert found is not None
        return found


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Here they are: both rings lie in `memory`, requests first. `bell` is the pool's end for a zeromq doorbell."""

    version: int
    epoch: int
    pid: Pid
    client: int
    memory: MemoryReference
    requests: RingLayout
    results: RingLayout
    catalogue: Catalogue
    max_k: int
    max_top_m: int
    token: bytes
    bell: str
    arena: Grant | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """No rings, and why."""

    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_attach = msgspec.msgpack.Decoder(Attach).decode
decode_answer = msgspec.msgpack.Decoder(Attached | Refused).decode


def result_offset(requests: RingLayout) -> int:
    """Where in a session's memory the result ring begins: the first page after the request ring."""
    return -(-requests.size // _PAGE) * _PAGE


def filter_offset(requests: RingLayout, results: RingLayout) -> int:
    """Where in a session's memory the places of filters begin: the first page after the result ring."""
    return -(-(result_offset(requests) + results.size) // _PAGE) * _PAGE


def session_bytes(requests: RingLayout, results: RingLayout) -> int:
    """A session's memory: both rings and the filters."""
    return filter_offset(requests, results) + FILTERS_BYTES


# ---- what the two sides of a session count


class ClientStatistics(msgspec.Struct, frozen=True):
    """Counters of a client since it was made.

    `submitted` requests; `returned` results (of them `lost`); `outstanding` now; submissions refused because the ring
    was `full`; doorbells `rung`; `cancelled` requests; results of a `stale` epoch.
    """

    submitted: int
    returned: int
    lost: int
    outstanding: int
    full: int
    rung: int
    cancelled: int
    stale: int


class ServerStatistics(msgspec.Struct, frozen=True):
    """Counters of a server since it was made.

    `clients` now; `attached`, `refused`, `lost` (closed or died) and `evicted` (broke the protocol) clients so far;
    requests `received` and `outstanding`; results `published` and `dropped` (their client was gone); requests refused
    as `invalid` or `stale`; doorbells `rung`; session messages that were `malformed`.
    """

    clients: int
    attached: int
    refused: int
    lost: int
    evicted: int
    received: int
    outstanding: int
    published: int
    dropped: int
    invalid: int
    stale: int
    rung: int
    malformed: int
