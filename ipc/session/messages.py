"""Messages by which a client and a pool open a session over ZeroMQ. All later communication uses the rings."""

from typing import Annotated, Literal

import msgspec

from ipc.errors import InvalidArgument
from ipc.memory.device import CudaReference
from ipc.memory.shared import MemoryReference, Pid
from ipc.ring.descriptors import Stage
from ipc.ring.filters import FILTERS_BYTES
from ipc.ring.ring import RingLayout
from ipc.session.device_arena import Lease

VERSION = 8
_PAGE = 4096
Token = Annotated[bytes, msgspec.Meta(max_length=64)]  # a mailbox reads no more of a datagram
MAX_MESSAGE_BYTES = 1 << 19

EVENTFD, ZEROMQ = "eventfd", "zeromq"
DOORBELLS = (EVENTFD, ZEROMQ)


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A client's request for a session: rings, and with `arena` slots of the arena of query vectors.

    `bell`: name of its FdMailbox (eventfd) or endpoint of its doorbell (zeromq).
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
    """A collection that a pool serves: the dimension of its vectors, and which of its `shards` this pool has.

    `identity` identifies the build: ids in results refer to it. `attributes`: the names that filters may use, with
    their types; `demanded`: the attribute that every filter must bind, or "". `in_place`: whether the pool reads
    vectors of unfiltered requests in its arena; otherwise they must be in the ring. Raises `InvalidArgument`.
    """

    name: str
    dim: int
    shard: int = 0
    shards: int = 1
    identity: str = ""
    attributes: dict[str, str] = {}
    demanded: str = ""
    in_place: bool = True

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise InvalidArgument(f"collection {self.name!r} has dimension {self.dim}; the minimum is 1")
        if not 0 <= self.shard < self.shards:
            raise InvalidArgument(f"collection {self.name!r} has no shard {self.shard} of {self.shards}")
        if len(self.identity) > MAX_IDENTITY:
            raise InvalidArgument(f"an identity has at most {MAX_IDENTITY} characters, got {len(self.identity)}")


class Unserved(msgspec.Struct, frozen=True):
    """A configured collection that a pool cannot serve, and the reason. Raises `InvalidArgument`."""

    name: str
    reason: str

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_REASON:
            raise InvalidArgument(f"a reason has at most {MAX_REASON} characters, got {len(self.reason)}")


class Catalogue(msgspec.Struct, frozen=True):
    """The collections of a pool; a session keeps the catalogue that it was opened with. `stage`: the queries that it
    answers first, "" for those of both stages.

    Raises `InvalidArgument` for duplicate names, or without any.
    """

    served: tuple[Served, ...]
    unserved: tuple[Unserved, ...] = ()
    stage: Stage | Literal[""] = ""

    def __post_init__(self) -> None:
        names = [*(one.name for one in self.served), *(one.name for one in self.unserved)]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument(f"a catalogue needs at least one collection, and unique names; got {names}")

    @property
    def max_dim(self) -> int:
        """Largest dimension; 1 without a served collection."""
        return max((served.dim for served in self.served), default=1)


class Grant(msgspec.Struct, frozen=True):
    """Lease of slots in the pool's arena of query vectors."""

    lease: Lease
    memory: CudaReference


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The reply that opens a session: both rings are in `memory`, requests first. `bell`: a zeromq endpoint."""

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
    token: Token
    bell: str
    arena: Grant | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The reply that refuses a session."""

    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_attach = msgspec.msgpack.Decoder(Attach).decode
decode_answer = msgspec.msgpack.Decoder(Attached | Refused).decode


def result_offset(requests: RingLayout) -> int:
    """Return the offset of the result ring in a session's memory: the first page after the request ring."""
    return -(-requests.size // _PAGE) * _PAGE


def filter_offset(requests: RingLayout, results: RingLayout) -> int:
    """Return the offset of the filter slots in a session's memory: the first page after the result ring."""
    return -(-(result_offset(requests) + results.size) // _PAGE) * _PAGE


def session_bytes(requests: RingLayout, results: RingLayout) -> int:
    """Return the bytes of a session's memory: both rings and the filter slots."""
    return filter_offset(requests, results) + FILTERS_BYTES
