"""Queue of incoming hand-overs in a decode worker: offered → blocks reserved → KV pulled, in order of arrival.

A prompt is admitted (its blocks are reserved) while prompts that wait here or for a batch slot hold less than a share
of all blocks, and while blocks suffice for it plus one for each running row (DistServe's rule, arXiv 2401.09670). Then
its blocks are pulled in slices, except those that are cached here. A prompt without KV is complete once it is admitted
and its KV in the tiers is loaded; the batch computes the rest.

A prompt of several passes is announced with its blocks after the first pass (an *early* pull): finished passes are
pulled while no complete prompt waits for a pull, so little is left when the prompt is complete. Early pulls use spare
blocks only and are evicted first.

A prompt whose KV is saved in a tier (`[handover] mode = "pool"`) is answered when it arrives: from then on nothing of
prefill is needed. What the tier has lost is computed here.
"""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from ipc import IpcError, Offer
from ipc.errors import MALFORMED
from runtime.serving import stages
from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.serving.kv.tiers import Load, SavedRow, Tiers
from runtime.serving.kv.transport import KvArray, KvSink, Transfer
from runtime.serving.messages import Decode, Reserve, decode_handover

SLICE_NS = 2_000_000  # copying between two steps of a running batch, at most a thirtieth of a step
WAITING_SHARE = 0.1  # of the KV blocks: while waiting requests hold less, another prompt is accepted
_MAX_CANCELLED = 4096  # remembered ids of cancelled requests


@dataclass(eq=False)
class Arrival:
    """A hand-over in progress. `table` holds its reserved blocks; `transfer` copies its KV up to block `end`, and the
    blocks before `pulled` are copied. `saved`: its KV is in a tier."""

    offer: Offer
    request: Decode | Reserve
    table: BlockTable | None = None
    transfer: Transfer | Load | None = None
    saved: SavedRow | None = None
    pulled: int = 0
    end: int = 0


class HandoverQueue:
    """Pulls hand-overs from `sink` into the blocks of `kv`. KV of a model with another `identity` is rejected."""

    def __init__(
        self, sink: KvSink, blocks: BlockManager, kv: KvArray, tiers: Tiers, identity: bytes, *, waiting_share: float
    ) -> None:
        self._sink, self._blocks, self._kv, self._tiers, self._identity = sink, blocks, kv, tiers, identity
        self._max_waiting_blocks = waiting_share * blocks.total
        self._offered: deque[Arrival] = deque()
        self._early: dict[str, Arrival] = {}  # prompts that prefill is computing
        self._pulling: deque[Arrival] = deque()
        self._to_compute: list[tuple[Decode, BlockTable]] = []
        # A cancellation can overtake the offers of its request. Ids are unique, so remembering the
        # latest ones is enough.
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        # Released blocks that a copy may still write to; they are freed when the copy has settled.
        self._releasing: list[tuple[Transfer | Load, BlockTable]] = []
        self.taken: list[str] = []  # requests whose saved KV has been announced since the caller emptied it
        self.busy_ns = 0  # time spent copying
        self.pulled_bytes = 0

    def __len__(self) -> int:
        return len((*self._offered, *self._early, *self._pulling, *self._releasing))

    @property
    def pulling(self) -> bool:
        """Whether there is KV to copy now."""
        return bool(self._pulling) or any(self._pullable_blocks(arrival) for arrival in self._early.values())

    @property
    def waiting(self) -> int:
        """Number of offered prompts that are not complete here."""
        return len(self._offered) + len(self._pulling)

    def receive(self, frontend_epoch: int) -> None:
        """Queue new offers. Reject offers of another frontend or another model."""
        self._free_settled()
        for offer in self._sink.receive():
            try:
                request = decode_handover(offer.payload)
            except MALFORMED as error:
                self._sink.reject(offer, f"malformed hand-over: {error}")
                continue
            if request.frontend_epoch != frontend_epoch:
                self._sink.reject(offer, f"its frontend (epoch {request.frontend_epoch}) is gone")
            elif request.request_id in self._cancelled:
                self._sink.reject(offer, "cancelled")
            elif request.model != self._identity:
                self._sink.reject(offer, "its KV is of another model or type, or in blocks of another size")
            elif isinstance(request, Decode) and request.saved:
                self._sink.acknowledge(offer)
                self.taken.append(request.request_id)
                keys = self._blocks.row_keys(request.tokens, request.salt)
                self._offered.append(Arrival(offer, request, saved=SavedRow(keys, len(request.tokens))))
            else:
                self._enqueue(Arrival(offer, request))

    def _enqueue(self, arrival: Arrival) -> None:
        request = arrival.request
        previous = self._early.pop(request.request_id, None)
        if previous is not None:
            self._sink.acknowledge(previous.offer)
            if previous.transfer is not None:
                previous.transfer.settle()
            if previous.table is not None and request.blocks:
                arrival.table = previous.table
                arrival.pulled = previous.pulled if _same_lease(previous.offer, arrival.offer) else 0
            else:
                self._release(previous)
        if isinstance(request, Reserve):
            self._early[request.request_id] = arrival
        elif arrival.table is not None:
            self._start_pull(arrival, request)
        else:
            self._offered.append(arrival)

    def admit(self, now_ns: int, *, running: int, waiting_blocks: int) -> None:
        """Reserve blocks for offered prompts, in order, while the rule allows it. Drop expired early pulls.

        `waiting_blocks` are held by rows that do not run yet; each of the `running` rows needs one more block.
        """
        while self._offered:
            arrival = self._offered[0]
            if self._is_current(arrival) and not self._reserve(arrival, running, waiting_blocks):
                break
            self._offered.popleft()
            if arrival.table is None:
                # Withdrawn, restarted, or its owner died: an unanswered offer keeps that owner's memory mapped.
                self._sink.reject(arrival.offer, "prefill has withdrawn its KV")
                continue
            assert isinstance(arrival.request, Decode), "early pulls are not queued"
            if arrival.saved is not None:
                arrival.request.stages[stages.HANDOVER_BEGIN] = time.monotonic_ns()
                arrival.transfer = self._tiers.restore(arrival.saved, arrival.table, arrival.request.tokens)
                self._pulling.append(arrival)
            elif not arrival.request.blocks:
                arrival.transfer = self._tiers.load(arrival.table, arrival.request.tokens)
                if arrival.transfer is not None:
                    self._pulling.append(arrival)
                    continue
                self._to_compute.append((arrival.request, arrival.table))
                self._sink.acknowledge(arrival.offer)
            else:
                self._start_pull(arrival, arrival.request)
        for early in self._early.values():
            if early.table is None and not self._offered:
                self._reserve(early, running, waiting_blocks)
        for early in tuple(self._early.values()):
            expired = isinstance(early.request, Reserve) and early.request.deadline_ns <= now_ns
            if expired or not self._sink.is_current(early.offer):
                self._evict(early)

    def _reserve(self, arrival: Arrival, running: int, waiting_blocks: int) -> bool:
        held = sum(len(pulled.table.blocks) for pulled in self._pulling if pulled.table is not None)
        held += sum(len(table.blocks) for _, table in self._to_compute)
        compute = int(isinstance(arrival.request, Decode) and not arrival.request.has_kv)
        tokens, salt = arrival.request.tokens, arrival.request.salt
        needed = self._blocks.blocks_needed(tokens, compute, salt)
        if held + waiting_blocks >= self._max_waiting_blocks:
            return False
        while needed + running > self._blocks.available:
            if arrival.request.request_id in self._early or not self._evict_early():
                return False
        arrival.table = self._blocks.open(tokens, compute, salt)
        self._blocks.grow(arrival.table, len(tokens))
        return True

    def _start_pull(self, arrival: Arrival, request: Decode) -> None:
        assert arrival.table is not None, "its blocks are reserved"
        present = self._present_blocks(arrival)
        try:
            arrival.transfer = self._sink.pull(
                arrival.offer, request.blocks[present:], self._kv, arrival.table.blocks[present:]
            )
        except (IpcError, ValueError) as error:
            self._reject(arrival, str(error))
            return
        request.stages[stages.HANDOVER_BEGIN] = time.monotonic_ns()
        self._pulling.append(arrival)

    def pull(self, for_ns: int | None) -> list[tuple[Decode, BlockTable]]:
        """Copy for about `for_ns` (None: until a prompt is complete). Return the prompts that are complete now, which
        are acknowledged, and those that the batch is to compute.

        All blocks of a prompt that came with KV are written; of others the first `BlockTable.reused_tokens` are.
        """
        complete, self._to_compute = self._to_compute, []
        while self._pulling and not complete:
            arrival = self._pulling[0]
            assert isinstance(arrival.request, Decode)
            assert arrival.transfer is not None
            assert arrival.table is not None
            pull = arrival.transfer if arrival.request.has_kv else None  # None: it is loaded instead of computed
            before_ns = pull.busy_ns if pull else 0
            try:
                done = arrival.transfer.step(for_ns)
            except IpcError as error:
                self._pulling.popleft()
                self._reject(arrival, str(error))
                continue
            self.busy_ns += pull.busy_ns - before_ns if pull else 0
            if not done:
                break
            self._pulling.popleft()
            if not self._is_current(arrival):
                self._reject(arrival, "prefill has withdrawn its KV")
                continue
            if arrival.saved is not None:
                self._tiers.release(arrival.saved)
            else:
                self._sink.acknowledge(arrival.offer)
            if pull:
                arrival.request.stages[stages.HANDOVER_END] = time.monotonic_ns()
                self.pulled_bytes += pull.bytes
            if arrival.request.blocks:
                self._blocks.fill(arrival.table, arrival.request.tokens, len(arrival.request.tokens))
            complete.append((arrival.request, arrival.table))
        if not self._pulling and not complete:
            self._pull_early(for_ns)
        return complete

    def evict_latest(self) -> bool:
        """Free the blocks of the latest prompt that has some; it waits for blocks again. Return False if none has any.

        If a device is writing to these blocks, wait for it: the write is short, and the blocks are needed now.
        """
        if self._releasing or self._evict_early():
            pass
        elif self._pulling:
            arrival = self._pulling.pop()
            self._release(arrival)
            self._offered.appendleft(arrival)
        else:
            return False
        for transfer, _ in self._releasing:
            transfer.settle()
        self._free_settled()
        return True

    def cancel(self, request_id: str) -> None:
        """Remove a cancelled request, and reject its offers that arrive later."""
        self._cancelled[request_id] = None
        if len(self._cancelled) > _MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        for arrival in [a for a in (*self._offered, *self._pulling) if a.request.request_id == request_id]:
            for queue in (self._offered, self._pulling):
                if arrival in queue:
                    queue.remove(arrival)
            self._reject(arrival, "cancelled")
        if request_id in self._early:
            self._evict(self._early[request_id])

    def clear(self) -> None:
        """Remove everything: the frontend has restarted, and its earlier requests are void."""
        for arrival in (*self._offered, *self._pulling):
            self._reject(arrival, "its frontend is gone")
        for early in tuple(self._early.values()):
            self._evict(early)
        self._offered.clear()
        self._pulling.clear()

    def _reject(self, arrival: Arrival, reason: str) -> None:
        self._release(arrival)
        if arrival.saved is not None:
            self._tiers.release(arrival.saved)
        self._sink.reject(arrival.offer, reason)

    def _is_current(self, arrival: Arrival) -> bool:
        return arrival.saved is not None or self._sink.is_current(arrival.offer)

    def _release(self, arrival: Arrival) -> None:
        if arrival.table is not None and arrival.transfer is not None:
            self._releasing.append((arrival.transfer, arrival.table))
            self._free_settled()
        elif arrival.table is not None:
            self._blocks.close(arrival.table)
        arrival.table = arrival.transfer = None
        arrival.pulled = 0

    # ---- early pulls: KV of prompts that prefill is computing

    def _present_blocks(self, arrival: Arrival) -> int:
        """Return how many of its first blocks are cached or pulled."""
        assert arrival.table is not None, "its blocks are reserved"
        return max(arrival.table.reused_tokens // self._blocks.block_tokens, arrival.pulled)

    def _pullable_blocks(self, arrival: Arrival) -> int:
        """Return how many of its first blocks prefill has written; 0 if all of them are present or it has no blocks."""
        if arrival.table is None:
            return 0
        written = min(self._sink.written(arrival.offer) // self._blocks.block_tokens, len(arrival.request.blocks))
        return written if written > self._present_blocks(arrival) else 0

    def _pull_early(self, for_ns: int | None) -> None:
        """Copy for about `for_ns` from the first prompt in progress that has new blocks."""
        arrival = next((early for early in self._early.values() if self._pullable_blocks(early)), None)
        if arrival is None or arrival.table is None:
            return
        present = self._present_blocks(arrival)
        arrival.end = arrival.end if arrival.transfer else self._pullable_blocks(arrival)
        source, target = arrival.request.blocks[present : arrival.end], arrival.table.blocks[present : arrival.end]
        try:
            pull = arrival.transfer or self._sink.pull(arrival.offer, source, self._kv, target)
            assert not isinstance(pull, Load), "a prompt that prefill computes is not loaded from tiers here"
            arrival.transfer, before_ns = pull, pull.busy_ns
            done = pull.step(for_ns)
        except (IpcError, ValueError):
            self._evict(arrival)  # its complete offer is pulled later, or rejected with the reason
            return
        self.busy_ns += pull.busy_ns - before_ns
        if done:
            arrival.pulled, arrival.transfer = arrival.end, None
            self.pulled_bytes += pull.bytes

    def _evict(self, early: Arrival) -> None:
        """Free the blocks of a prompt that is not complete; its offer is then queued like any other."""
        del self._early[early.request.request_id]
        self._release(early)
        self._sink.acknowledge(early.offer)

    def _evict_early(self) -> bool:
        """Evict the latest early pull that has blocks. Return False if there is none."""
        latest = next((early for early in reversed(self._early.values()) if early.table is not None), None)
        if latest is not None:
            self._evict(latest)
        return latest is not None

    def _free_settled(self) -> None:
        unsettled: list[tuple[Transfer | Load, BlockTable]] = []
        for transfer, table in self._releasing:
            if transfer.settled:
                self._blocks.close(table)
            else:
                unsettled.append((transfer, table))
        self._releasing = unsettled


def _same_lease(one: Offer, other: Offer) -> bool:
    """Return whether both offers refer to the same lease of the same memory, so that its content is the same."""
    return (one.arena, one.epoch, one.slot, one.generation) == (other.arena, other.epoch, other.slot, other.generation)
