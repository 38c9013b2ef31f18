"""The bridge from prefill: hand-overs on their way in, offered → given room → pulled, in the order they came.

A prompt is given room while what waits here and for a place in the batch has less than a share of all blocks, and as
long as there are blocks for it beside one for each running row (the rule is DistServe's, arXiv 2401.09670). Then its
blocks are pulled in slices, only those that are not here already. A prompt that was announced before it was run (order
"decode first") is given room at once by the same rule; its offer only has to be pulled. One that comes without KV is
whole when it has room and what KV tiers have of it is loaded: the rest is computed here.
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
    """A prompt on its way in. With a `table` it has room, with a `transfer` it is being pulled."""

    offer: Offer
    request: Decode | Reserve
    table: BlockTable | None = None
    transfer: Transfer | Load | None = None


class Bridge:
    """Takes hand-overs from `sink` into the blocks of `kv`. `identity` is the model's: another one's KV is refused."""

    def __init__(
        self, sink: KvSink, blocks: BlockManager, kv: KvArray, tiers: Tiers, identity: bytes, *, waiting_share: float
    ) -> None:
        self._sink, self._blocks, self._kv, self._tiers, self._identity = sink, blocks, kv, tiers, identity
        self._most_waiting = waiting_share * blocks.total
        self._offered: deque[Arrival] = deque()
        self._reserved: dict[str, Arrival] = {}
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
        return len(self._offered) + len(self._reserved) + len(self._pulling) + len(self._leaving)

    @property
    def pulling(self) -> bool:
        """Whether there is something to copy now."""
        return bool(self._pulling)

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
            elif isinstance(request, Decode) and request.model != self._identity:
                self._sink.reject(offer, "its KV is of another model, or in blocks of another size")
            else:
                arrival = Arrival(offer, request)
                kept = self._reserved.pop(request.request_id, None)
                if kept is None or isinstance(request, Reserve) or not request.blocks:
                    if kept is not None:
                        self._release(kept)
                    self._offered.append(arrival)
                else:
                    arrival.table = kept.table
                    self._begin(arrival, request)

    def give_room(self, now_ns: int, *, running: int, waiting_blocks: int) -> None:
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
                arrival.table.asked_ns = arrival.request.stages.get(stages.RECEIVED, 0)
                arrival.transfer = self._tiers.load(arrival.table, arrival.request.tokens)
                if arrival.transfer is not None:
                    self._pulling.append(arrival)
                    continue
                self._to_compute.append((arrival.request, arrival.table))
                self._sink.acknowledge(arrival.offer)
            else:
                self._begin(arrival, arrival.request)
        for kept in list(self._reserved.values()):
            if isinstance(kept.request, Reserve) and kept.request.deadline_ns <= now_ns:
                self._release(self._reserved.pop(kept.request.request_id))

    def _reserve(self, arrival: Arrival, running: int, waiting_blocks: int) -> bool:
        held = sum(len(a.table.blocks) for a in (*self._reserved.values(), *self._pulling) if a.table is not None)
        held += sum(len(table.blocks) for _, table in self._to_compute)
        compute = int(isinstance(arrival.request, Decode) and not arrival.request.blocks)
        tokens, salt = arrival.request.tokens, arrival.request.salt
        needed = self._blocks.missing(tokens, compute, salt)
        if held + waiting_blocks >= self._most_waiting or needed + running > self._blocks.available:
            return False
        arrival.table = self._blocks.open(tokens, compute, salt)
        self._blocks.grow(arrival.table, len(tokens))
        return True

    def _begin(self, arrival: Arrival, request: Decode) -> None:
        assert arrival.table is not None, "it has been given room"
        here = arrival.table.reused_tokens // self._blocks.block_tokens
        try:
            arrival.transfer = self._sink.pull(
                arrival.offer, request.blocks[here:], self._kv, arrival.table.blocks[here:]
            )
        except (IpcError, ValueError) as error:
            self._refuse(arrival, str(error))
            return
        arrival.table.asked_ns = request.stages.get(stages.RECEIVED, 0)
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
        return whole

    def make_room(self) -> bool:
        """The latest prompt that has room loses it, and waits again; False if none has any.

        Where a device is writing into its blocks just now, that is waited for: it is a moment, and room is needed now.
        """
        if self._leaving:
            pass
        elif self._reserved:
            self._release(self._reserved.pop(next(reversed(self._reserved))))
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

    def drop(self, request_id: str) -> None:
        """A request was cancelled: what is here of it goes, and what is yet to come is refused."""
        self._dropped[request_id] = None
        if len(self._dropped) > _REMEMBERED:
            self._dropped.popitem(last=False)
        for arrival in [a for a in (*self._offered, *self._pulling) if a.request.request_id == request_id]:
            for queue in (self._offered, self._pulling):
                if arrival in queue:
                    queue.remove(arrival)
            self._refuse(arrival, "cancelled")
        if request_id in self._reserved:
            self._release(self._reserved.pop(request_id))

    def clear(self) -> None:
        """The frontend has changed: all that is here belongs to the one before."""
        for arrival in (*self._offered, *self._pulling, *self._reserved.values()):
            self._refuse(arrival, "its frontend is gone")
        self._offered.clear()
        self._pulling.clear()
        self._reserved.clear()

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

    def _settle(self) -> None:
        still: list[tuple[Transfer | Load, BlockTable]] = []
        for transfer, table in self._leaving:
            if transfer.settled:
                self._blocks.close(table)
            else:
                still.append((transfer, table))
        self._leaving = still
