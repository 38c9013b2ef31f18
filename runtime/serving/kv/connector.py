"""The two ends of KV's way from prefill to decode: `KvSource` and `KvSink`.

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
IPC. What is said, leased, withdrawn or found stale is the same, and is `ipc.handover.messages`'s.
"""

from collections.abc import Callable, Sequence

from ipc import HandoverSink, HandoverSource, KvArena, Offer
from ipc.handover.arena import OpenDevice
from ipc.memory.device import CudaArray
from runtime.serving.kv.transfer import KvArray, Transfer


class KvSource(HandoverSource):
    """Prefill's end. One thread; nothing blocks.

    memory: where the model's KV tensor must lie, the arena's payload. The arena's slots are the leases, and one more
    that announcements are made with.
    """

    def __init__(self, name: str, arena: KvArena, memory: memoryview | CudaArray, *, lease_ms: float) -> None:
        super().__init__(name, arena, lease_ms=lease_ms)
        self.memory = memory
        self._announcing = arena.slots - 1  # never begun anew
        self._free = list(range(self._announcing))

    def lease(self) -> int | None:
        """A lease for one prompt's blocks, or None while all are out."""
        return self._free.pop() if self._free else None

    def release(self, lease: int) -> None:
        """The prompt's blocks may be written anew; whoever still pulls them finds that out."""
        self._arena.begin(lease)
        self._free.append(lease)

    @property
    def free_leases(self) -> int:
        """Leases that are not out."""
        return len(self._free)

    def announce(self, endpoint: str, message: bytes) -> int:
        """Ask the sink at `endpoint` to keep room; the id of the outcome."""
        return self.offer(endpoint, self._announcing, message)


Pull = Callable[[HandoverSink, Offer, Sequence[int], KvArray, Sequence[int]], Transfer]
"""How blocks are pulled out of an arena: see `KvSink.pull`."""


class KvSink(HandoverSink):
    """Decode's end. One thread; nothing blocks."""

    def __init__(self, endpoint: str, pull: Pull, open_device: OpenDevice | None = None) -> None:
        super().__init__(endpoint, open_device)
        self._pull = pull

    def pull(self, offer: Offer, taken: Sequence[int], kv: KvArray, given: Sequence[int]) -> Transfer:
        """The copy of the source's blocks `taken` into `given` of `kv`. Raises IpcError, ValueError."""
        return self._pull(self, offer, taken, kv, given)
