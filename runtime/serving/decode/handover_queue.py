"""The bridge from prefill: hand-overs on their way in, offered → given room → pulled, in the order they came.

A prompt is given room while what waits here and for a place in the batch has less than a share of all blocks, and as
long as there are blocks for it beside one for each running row (the rule is DistServe's, arXiv 2401.09670). Then its
blocks are pulled in slices, only those that are not here already. A prompt that was announced before it was run (order
"decode first") is given room at once by the same rule; its offer only has to be pulled. One that comes without KV is
whole when it has room and what KV tiers have of it is loaded: the rest is computed here.

A prompt of several passes is announced with its blocks when the first one is over: what there is of it is pulled while
nothing else is to be, and little is left when it is whole. It has room that nobody else wants, unless it had it before.
"""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from ipc import IpcError, Offer
from ipc.errors import MALFORMED
from runtime.serving import stages
from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.serving.kv.tiers import Load, Tiers
from runtime.serving.kv.transport import KvArray, KvSink, Transfer
from runtime.serving.messages import Decode, Reserve, decode_handover

_REMEMBERED = 4096  # ids of cancelled requests


@dataclass(eq=False)
class Arrival:
    """A prompt on its way in. With a `table` it has room, with a `transfer` it is being pulled, up to its block `end`;
    those before `pulled` are here."""

    offer: Offer
    request: Decode | Reserve
    table: BlockTable | None = None
    transfer: Transfer | Load | None = None
    pulled: int = 0
    end: int = 0


class HandoverQueue:
    """Takes hand-overs from `sink` into the blocks of `kv`. `identity` is the model's: another one's KV is refused."""

    def __init__(
        self, sink: KvSink, blocks: BlockManager, kv: KvArray, tiers: Tiers, identity: bytes, *, waiting_share: float
    ) -> None:
        self._sink, self._blocks, self._kv, self._tiers, self._identity = sink, blocks, kv, tiers, identity
        self._most_waiting = waiting_share * blocks.total
        self._offered: deque[Arrival] = deque()
        self._reserved: dict[str, Arrival] = {}
        self._ahead: dict[str, Arrival] = {}  # still computed, without a reservation
        self._pulling: deque[Arrival] = deque()
        self._to_compute: list[tuple[Decode, BlockTable]] = []
        # A word to forget a request can overtake its announcement and its offer. Ids come once: remembering the last
        # ones is enough.
        self._dropped: OrderedDict[str, None] = OrderedDict()
        # What lost its room while its blocks were being written: they are not free before that has ended.
        self._leaving: list[tuple[Transfer | Load, BlockTable]] = []
        self.busy_ns = 0  # spent copying
        self.pulled_bytes = 0

    def __len__(self) -> int:
        return len((*self._offered, *self._reserved, *self._ahead, *self._pulling, *self._leaving))

    @property
    def pulling(self) -> bool:
        """Whether there is something to copy now."""
        return bool(self._pulling) or any(self._there(arrival) for arrival in self._computed)

    @property
    def waiting(self) -> int:
        """Prompts that are not here yet, and could be."""
        return len(self._offered) + len(self._pulling)

    def receive(self, frontend_epoch: int) -> None:
        """Take in what was offered. What belongs to another frontend or another model is refused."""
        self._settle()
        for offer in self._sink.receive():
            try:
                request = decode_handover(offer.payload)
            except MALFORMED as error:
                self._sink.reject(offer, f"its payload is no hand-over: {error}")
                continue
            if request.frontend_epoch != frontend_epoch:
                self._sink.reject(offer, f"its frontend (epoch {request.frontend_epoch}) is gone")
            elif request.request_id in self._dropped:
                self._sink.reject(offer, "cancelled")
            elif (isinstance(request, Decode) or request.blocks) and request.model != self._identity:
                self._sink.reject(offer, "its KV is of another model or type, or in blocks of another size")
            else:
                self._take(Arrival(offer, request))

    def _take(self, arrival: Arrival) -> None:
        request = arrival.request
        reserved = self._reserved.pop(request.request_id, None)
        kept = reserved or self._ahead.pop(request.request_id, None)
        if kept is not None and kept.request.blocks:
            self._sink.acknowledge(kept.offer)
            if kept.transfer is not None:
                kept.transfer.settle()
        if kept is not None and kept.table is not None and request.blocks:
            arrival.table = kept.table
            arrival.pulled = kept.pulled if _same(kept.offer, arrival.offer) else 0
        elif kept is not None:
            self._release(kept)
        if isinstance(request, Decode) and arrival.table is not None:
            self._begin(arrival, request)
        elif isinstance(request, Decode) or not request.blocks:
            self._offered.append(arrival)
        else:
            (self._reserved if reserved is not None else self._ahead)[request.request_id] = arrival

    def admit(self, now_ns: int, *, running: int, waiting_blocks: int) -> None:
        """Give blocks to those that were offered, in their order, while the rule allows.

        `waiting_blocks` are held by rows that have no place in the batch yet, `running` rows want one more each.
        """
        while self._offered:
            arrival = self._offered[0]
            if self._sink.current(arrival.offer) and not self._reserve(arrival, running, waiting_blocks):
                break
            self._offered.popleft()
            if arrival.table is None:
                # Withdrawn, begun anew, or its owner died: whatever is still open keeps that owner's memory mapped.
                self._sink.reject(arrival.offer, "prefill has taken its KV back")
                continue
            if isinstance(arrival.request, Reserve):
                self._reserved[arrival.request.request_id] = arrival
                self._sink.acknowledge(arrival.offer)
            elif not arrival.request.blocks:
                arrival.table.requested_ns = arrival.request.stages.get(stages.RECEIVED, 0)
                arrival.transfer = self._tiers.load(arrival.table, arrival.request.tokens)
                if arrival.transfer is not None:
                    self._pulling.append(arrival)
                    continue
                self._to_compute.append((arrival.request, arrival.table))
                self._sink.acknowledge(arrival.offer)
            else:
                self._begin(arrival, arrival.request)
        for ahead in self._ahead.values():
            if ahead.table is None and not self._offered:
                self._reserve(ahead, running, waiting_blocks)
        for kept in (*self._reserved.values(), *self._ahead.values()):
            over = isinstance(kept.request, Reserve) and kept.request.deadline_ns <= now_ns
            if over or (kept.request.blocks and not self._sink.current(kept.offer)):
                self._give_up(kept)

    def _reserve(self, arrival: Arrival, running: int, waiting_blocks: int) -> bool:
        held = sum(len(a.table.blocks) for a in (*self._reserved.values(), *self._pulling) if a.table is not None)
        held += sum(len(table.blocks) for _, table in self._to_compute)
        compute = int(isinstance(arrival.request, Decode) and not arrival.request.blocks)
        tokens, salt = arrival.request.tokens, arrival.request.salt
        needed = self._blocks.blocks_needed(tokens, compute, salt)
        if held + waiting_blocks >= self._most_waiting:
            return False
        while needed + running > self._blocks.available:
            if arrival.request.request_id in self._ahead or not self._room_of_ahead():
                return False
        arrival.table = self._blocks.open(tokens, compute, salt)
        self._blocks.grow(arrival.table, len(tokens))
        return True

    def _begin(self, arrival: Arrival, request: Decode) -> None:
        assert arrival.table is not None, "it has been given room"
        here = self._here(arrival)
        try:
            arrival.transfer = self._sink.pull(
                arrival.offer, request.blocks[here:], self._kv, arrival.table.blocks[here:]
            )
        except (IpcError, ValueError) as error:
            self._refuse(arrival, str(error))
            return
        arrival.table.requested_ns = request.stages.get(stages.RECEIVED, 0)
        request.stages[stages.HANDOVER_BEGIN] = time.monotonic_ns()
        self._pulling.append(arrival)

    def pull(self, for_ns: int | None) -> list[tuple[Decode, BlockTable]]:
        """Copy for about `for_ns` (None: until something is whole); what is whole now, acknowledged, or to be computed.

        Of a prompt's blocks the first `BlockTable.reused_tokens` are written then, or, where it came with KV, all.
        """
        whole, self._to_compute = self._to_compute, []
        while self._pulling and not whole:
            arrival = self._pulling[0]
            assert isinstance(arrival.request, Decode)
            assert arrival.transfer is not None
            assert arrival.table is not None
            pull = None if isinstance(arrival.transfer, Load) else arrival.transfer  # or it is loaded from a tier
            before = pull.busy_ns if pull else 0
            try:
                done = arrival.transfer.step(for_ns)
            except IpcError as error:
                self._pulling.popleft()
                self._refuse(arrival, str(error))
                continue
            self.busy_ns += pull.busy_ns - before if pull else 0
            if not done:
                break
            self._pulling.popleft()
            if not self._sink.current(arrival.offer):
                self._refuse(arrival, "prefill has taken its KV back")
                continue
            self._sink.acknowledge(arrival.offer)
            if pull:
                arrival.request.stages[stages.HANDOVER_END] = time.monotonic_ns()
                self._blocks.fill(arrival.table, arrival.request.tokens, len(arrival.request.tokens))
                self.pulled_bytes += pull.bytes
            whole.append((arrival.request, arrival.table))
        if not self._pulling and not whole:
            self._pull_computed(for_ns)
        return whole

    def evict_latest(self) -> bool:
        """The latest prompt that has room loses it, and waits again; False if none has any.

        Where a device is writing into its blocks just now, that is waited for: it is a moment, and room is needed now.
        """
        if self._leaving or self._room_of_ahead():
            pass
        elif self._reserved:
            self._give_up(self._reserved[next(reversed(self._reserved))])
        elif self._pulling:
            arrival = self._pulling.pop()
            self._release(arrival)
            self._offered.appendleft(arrival)
        else:
            return False
        for transfer, _ in self._leaving:
            transfer.settle()
        self._settle()
        return True

    def cancel(self, request_id: str) -> None:
        """A request was cancelled: what is here of it goes, and what is yet to come is refused."""
        self._dropped[request_id] = None
        if len(self._dropped) > _REMEMBERED:
            self._dropped.popitem(last=False)
        for arrival in [a for a in (*self._offered, *self._pulling) if a.request.request_id == request_id]:
            for queue in (self._offered, self._pulling):
                if arrival in queue:
                    queue.remove(arrival)
            self._refuse(arrival, "cancelled")
        for kept in (self._reserved, self._ahead):
            if request_id in kept:
                self._give_up(kept[request_id])

    def clear(self) -> None:
        """The frontend has changed: all that is here belongs to the one before."""
        for arrival in (*self._offered, *self._pulling):
            self._refuse(arrival, "its frontend is gone")
        for kept in (*self._reserved.values(), *self._ahead.values()):
            self._give_up(kept)
        self._offered.clear()
        self._pulling.clear()

    def _refuse(self, arrival: Arrival, reason: str) -> None:
        self._release(arrival)
        self._sink.reject(arrival.offer, reason)

    def _release(self, arrival: Arrival) -> None:
        if arrival.table is not None and arrival.transfer is not None:
            self._leaving.append((arrival.transfer, arrival.table))
            self._settle()
        elif arrival.table is not None:
            self._blocks.close(arrival.table)
        arrival.table = arrival.transfer = None
        arrival.pulled = 0

    # ---- prompts that are still computed: what there is of them comes ahead of their offers

    @property
    def _computed(self) -> list[Arrival]:
        return [kept for kept in (*self._reserved.values(), *self._ahead.values()) if kept.request.blocks]

    def _here(self, arrival: Arrival) -> int:
        """How many of its first blocks need not be pulled any more."""
        assert arrival.table is not None, "it has been given room"
        return max(arrival.table.reused_tokens // self._blocks.block_tokens, arrival.pulled)

    def _there(self, arrival: Arrival) -> int:
        """How many of its first blocks prefill has written, if that is more than are here, and it has room; else 0."""
        if arrival.table is None:
            return 0
        written = min(self._sink.written(arrival.offer) // self._blocks.block_tokens, len(arrival.request.blocks))
        return written if written > self._here(arrival) else 0

    def _pull_computed(self, for_ns: int | None) -> None:
        """Copy for about `for_ns` of the first prompt of which there is more."""
        arrival = next((arrival for arrival in self._computed if self._there(arrival)), None)
        if arrival is None or arrival.table is None:
            return
        here, arrival.end = self._here(arrival), arrival.end if arrival.transfer else self._there(arrival)
        taken, given = arrival.request.blocks[here : arrival.end], arrival.table.blocks[here : arrival.end]
        try:
            pull = arrival.transfer or self._sink.pull(arrival.offer, taken, self._kv, given)
            assert not isinstance(pull, Load), "what is computed by prefill is not loaded here"
            arrival.transfer, before = pull, pull.busy_ns
            done = pull.step(for_ns)
        except (IpcError, ValueError):
            self._give_up(arrival)  # its offer is pulled yet, or refused with the reason
            return
        self.busy_ns += pull.busy_ns - before
        if done:
            arrival.pulled, arrival.transfer = arrival.end, None
            self.pulled_bytes += pull.bytes

    def _give_up(self, kept: Arrival) -> None:
        """It loses its room, and its offer will be one like any other."""
        for found in (self._reserved, self._ahead):
            if found.get(kept.request.request_id) is kept:
                del found[kept.request.request_id]
        self._release(kept)
        if kept.request.blocks:
            self._sink.acknowledge(kept.offer)

    def _room_of_ahead(self) -> bool:
        """The latest without a reservation loses its room; False if none has any."""
        found = next((kept for kept in reversed(self._ahead.values()) if kept.table is not None), None)
        if found is not None:
            self._give_up(found)
        return found is not None

    def _settle(self) -> None:
        still: list[tuple[Transfer | Load, BlockTable]] = []
        for transfer, table in self._leaving:
            if transfer.settled:
                self._blocks.close(table)
            else:
                still.append((transfer, table))
        self._leaving = still


def _same(one: Offer, other: Offer) -> bool:
    """Whether both are of the same content of the same slot."""
    return (one.arena, one.epoch, one.slot, one.generation) == (other.arena, other.epoch, other.slot, other.generation)
