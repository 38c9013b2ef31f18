"""How KV gets from prefill to decode: an interface, and what its transports have in common.

```
prefill (KvSource)                                      decode (KvSink)
  memory: KV lies here         ◀── mapped by the sink ──
  lease() ─▶ one of a few                                  receive()
  offer(endpoint, lease, message) ────────────────▶        … finds room …
                                                           pull(offer, …) ─▶ Transfer: step, step, step
                                                           current(offer)? the copy is whole
  poll() ◀──────────────────── accepted or not ────        acknowledge(offer) | reject(offer, reason)
  release(lease): blocks may be written anew
```
A lease covers all blocks of one prompt: until it is released they are not written. In order "decode first" an
announcement goes ahead of the offer; it has no memory to pull, its acknowledgement means that there is room.
`withdraw` takes an offer back; what is being pulled then is no longer current.

The transports (`transport.py`) differ in whose memory KV lies in: the host's, or a GPU's that is shared through CUDA
IPC. What is said, leased, withdrawn or found stale is the same.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from ipc import HandoverSink, HandoverSource, KvArena, Offer, Outcome
from ipc.device_memory import CudaArray
from runtime.serving.kv.transfer import KvArray, Transfer


class KvSource(Protocol):
    """Prefill's end. One thread; nothing blocks."""

    @property
    def memory(self) -> memoryview | CudaArray:
        """Where the model's KV tensor must lie."""

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Readable when outcomes came."""

    def lease(self) -> int | None:
        """A lease for one prompt's blocks, or None while all are out."""

    @property
    def free_leases(self) -> int:
        """Leases that are not out."""

    def release(self, lease: int) -> None:
        """The prompt's blocks may be written anew; whoever still pulls them finds that out."""

    def announce(self, endpoint: str, message: bytes) -> int:
        """Ask the sink at `endpoint` to keep room; the id of the outcome."""

    def offer(self, endpoint: str, lease: int, message: bytes) -> int:
        """Offer the blocks that `message` names, under `lease`; the id of the outcome."""

    def withdraw(self, offer_id: int) -> bool:
        """Take an offer or announcement back. False: it has ended already."""

    def poll(self) -> list[Outcome]:
        """Outcomes since the last call."""

    def close(self) -> None:
        """End it all."""


class KvSink(Protocol):
    """Decode's end. One thread; nothing blocks."""

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Readable when offers came."""

    def receive(self) -> list[Offer]:
        """Offers and announcements since the last call."""

    def pull(self, offer: Offer, taken: Sequence[int], kv: KvArray, given: Sequence[int]) -> Transfer:
        """The copy of the source's blocks `taken` into `given` of `kv`. Raises IpcError, ValueError."""

    def current(self, offer: Offer) -> bool:
        """Whether the offer still stands; asked after a copy, whether the blocks were the offer's to its end."""

    def acknowledge(self, offer: Offer) -> bool:
        """The blocks are here (or there is room for what was announced)."""

    def reject(self, offer: Offer, reason: str) -> bool:
        """They will not be pulled."""

    def close(self) -> None:
        """End it all."""


class ArenaSource:
    """A `KvSource` over an arena: its payload is `memory`, its slots are the leases and one for announcements."""

    def __init__(self, name: str, arena: KvArena, memory: memoryview | CudaArray, *, lease_ms: float) -> None:
        self.memory = memory
        self._announcing = arena.slots - 1  # never begun anew
        self._arena = arena
        self._source = HandoverSource(name, arena, lease_ms=lease_ms)
        self._free = list(range(self._announcing))

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._source.socket

    def lease(self) -> int | None:
        return self._free.pop() if self._free else None

    def release(self, lease: int) -> None:
        self._arena.begin(lease)
        self._free.append(lease)

    @property
    def free_leases(self) -> int:
        return len(self._free)

    def announce(self, endpoint: str, message: bytes) -> int:
        return self._source.offer(endpoint, self._announcing, message)

    def offer(self, endpoint: str, lease: int, message: bytes) -> int:
        return self._source.offer(endpoint, lease, message)

    def withdraw(self, offer_id: int) -> bool:
        return self._source.withdraw(offer_id)

    def poll(self) -> list[Outcome]:
        return self._source.poll()

    def close(self) -> None:
        self._source.close()


Pull = Callable[[HandoverSink, Offer, Sequence[int], KvArray, Sequence[int]], Transfer]
"""How blocks are pulled out of an arena: see `KvSink.pull`."""


class ArenaSink:
    """A `KvSink` over the sources' arenas."""

    def __init__(self, sink: HandoverSink, pull: Pull) -> None:
        self._sink, self._pull = sink, pull

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._sink.socket

    def receive(self) -> list[Offer]:
        return self._sink.receive()

    def pull(self, offer: Offer, taken: Sequence[int], kv: KvArray, given: Sequence[int]) -> Transfer:
        return self._pull(self._sink, offer, taken, kv, given)

    def current(self, offer: Offer) -> bool:
        return self._sink.current(offer)

    def acknowledge(self, offer: Offer) -> bool:
        return self._sink.acknowledge(offer)

    def reject(self, offer: Offer, reason: str) -> bool:
        return self._sink.reject(offer, reason)

    def close(self) -> None:
        self._sink.close()
