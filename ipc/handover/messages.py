"""Messages and memory layout of the KV hand-over: prefill owns an arena of slots, decode pulls from it.

`source.py` is prefill's end, `sink.py` decode's. Offers travel prefill → decode and outcomes decode → prefill, over
one-way ZeroMQ sockets. Each offer ends exactly once at its source: accepted, rejected (with a reason), withdrawn,
'lost' (the decode process died), or 'expired' (no message from the sink within the lease; this is safe, because a late
pull finds another generation). A live sink sends `Held` for the offers that it has not answered yet, which renews their
leases.

```
arena, byte 0     magic | version | slots | payload offset | payload bytes | epoch | 0 | 0       int64, written once
            64    generation of slot 0 | of slot 1 | …                                           int64
64 + 8 · slots    written of slot 0 | of slot 1 | …                                              int64
payload offset    payload, opaque here (a KV tensor)
```
The payload may be in a GPU's memory instead; then the offset is 0 and nothing follows the `written` words. These words
stay in host memory, so that reading one is a load and needs no access to a device.

Only the owner can map the arena writable. A slot's generation rises in `begin`, before the slot is rewritten; an offer
carries the generation at which it was made. The puller copies first and calls `is_current` then: if the generation has
changed, the copy may be torn and is discarded. On a GPU this holds because the owner launches kernels that rewrite a
slot after `begin`, and the puller checks after its copy has ended.

A slot may be offered before it is complete: `written` is the amount written so far, in a unit defined by the users, and
0 after `begin`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from ipc.memory.device import CudaReference
from ipc.memory.shared import MemoryReference, Pid

MAX_PAYLOAD_BYTES = 1 << 22  # of an offer's message, not of the arena
MAX_PEERS = 1024
MAX_REASON = 500
MAX_HELD = 256  # offers in one message

MAGIC = 0x3141564B49525254  # "TRRIKVA1"
VERSION = 2
HEADER_BYTES = 64
MAX_SLOTS = 1 << 20
MAX_ARENA_BYTES = 1 << 42
PAGE = 4096


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A slot to pull: `payload` is the source's message, `source` its name. (`reply`, `offer_id`) identifies it.

    `device`: the GPU memory with the arena's payload, if that is not in `arena`. `watched`: the source already watches
    the sink's process, so `Seen` is not needed.
    """

    offer_id: int
    source: str
    reply: str
    epoch: int
    slot: int
    generation: int
    arena: MemoryReference
    payload: bytes
    device: CudaReference | None = None
    watched: bool = False


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """The source withdraws an offer."""

    offer_id: int
    reply: str


class Seen(msgspec.Struct, frozen=True, tag=True):
    """The sink has received an offer; `pid` is its process, which the source watches from now on."""

    offer_id: int
    pid: Pid


class Held(msgspec.Struct, frozen=True, tag=True):
    """The sink is alive and has not answered these offers yet."""

    offer_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_HELD)]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The sink's answer to an offer."""

    offer_id: int
    accepted: bool
    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_at_sink = msgspec.msgpack.Decoder(Offer | Withdrawn).decode
decode_at_source = msgspec.msgpack.Decoder(Seen | Held | Ended).decode


class Outcome(msgspec.Struct, frozen=True):
    """How an offer ended. `reason` is '' when accepted, else the sink's, 'withdrawn', 'lost' or 'expired'."""

    offer_id: int
    slot: int
    accepted: bool
    reason: str
