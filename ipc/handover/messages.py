"""KV hand-over between processes: prefill owns an arena of slots, decode pulls, and its word frees the slot.

Here is what they agree on, messages and memory; `source.py` is prefill's end, `sink.py` decode's. Offers travel prefill
→ decode and outcomes decode → prefill, over one-way ZeroMQ sockets. Each offer ends exactly once at its source:
accepted, rejected (with a reason), withdrawn, 'lost' (the decode process died), or 'expired' (no word within the lease;
safe, because a late puller meets another generation). A sink that lives says `Held` of what it has not answered yet,
and the leases begin anew.

```
arena, byte 0     magic | version | slots | payload offset | payload bytes | epoch | 0 | 0       int64, written once
            64    generation of slot 0 | of slot 1 | …                                           int64
64 + 8 · slots    written of slot 0 | of slot 1 | …                                              int64
payload offset    payload: what it means is the users' business (a KV tensor)
```
The payload may lie in a GPU's memory instead; then the offset is 0 and nothing follows the generations. These stay in
host memory, so that looking at one is a load and never a question to a device.

Only the owner can map it writable. A slot's generation rises in `begin`, before the slot is written anew; an offer
carries the generation it was made under. So the puller copies first and asks `current` then: if the generation
moved, the copy may be torn and is thrown away. On a GPU the same holds because the owner's kernels that write a slot
anew are launched after `begin`, and the puller asks after its copy has ended.

A slot may be offered before all of it is there: `written` says how much is, in the users' measure, and is 0 after
`begin`.
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

    `device` is where the arena's own payload lies, if not in `arena` itself but in a GPU's memory.
    `watched`: the source knows the sink's process already, and need not be told with `Seen`.
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
    """The source takes an offer back."""

    offer_id: int
    reply: str


class Seen(msgspec.Struct, frozen=True, tag=True):
    """The sink has an offer, and is this process: its death can be watched from now on."""

    offer_id: int
    pid: Pid


class Held(msgspec.Struct, frozen=True, tag=True):
    """The sink lives, and still has these offers."""

    offer_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_HELD)]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The sink's answer."""

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
