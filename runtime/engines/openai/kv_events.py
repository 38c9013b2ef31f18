"""KV events of model servers: what each has cached, as vLLM publishes it over ZeroMQ (`--kv-events-config`).

A message has three frames: topic, number (8 bytes, big-endian, from 0 on) and a batch in MessagePack: [time, events…].
An event is a map with a `type`, or in older versions a list whose first item that is: BlockStored (hashes, the hash of
the block before them, token ids, block size, …, medium), BlockRemoved, or AllBlocksCleared. The servers' hashes are
their own; blocks are identified here by hashes over their token ids, so that a prompt that one server has computed is
found on another.

A server's account holds from its message 0 on. After a gap, and at the start, the missed messages are requested from
its replay endpoint, if it has one; if they are no longer there, or if a prompt that it computed is not published for
five seconds, the server is judged by what was sent to it. Earlier versions, and SGLang, repeat them without the topic.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from runtime.engines.event_endpoints import EventEndpoints
from runtime.serving.frontend.cached_blocks import MOST_KEYS, CachedBlocks, PrefixKeys
from runtime.serving.kv.blocks import block_keys

log = logging.getLogger(__name__)

TIER_SHARE = 0.5  # of a block in a server's own tier: what loading it saves is not published
SILENT_NS = 5_000_000_000
_MAX_MESSAGE_BYTES = 4 << 20  # of the events of one step
_QUEUE = 10_000
_MAX_RECONNECT_MS = 2_000  # a model takes a minute to load
_MAX_BLOCK_TOKENS = 4096
_MAX_HASH_BYTES = 64
_REPLAY_S = 5.0
_MOST_REPLAYED = 100_000  # messages
_END = (-1).to_bytes(8, "big", signed=True)
_ROOT = b"server"
_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip

_decode = msgspec.msgpack.Decoder().decode

Hash = int | bytes
Event = dict[str, Any]


class ServerBlocks(CachedBlocks):
    """The blocks of one server, from its messages. `clock` returns monotonic ns. `known`: prefixes by the size of
    blocks, which servers share.

    Blocks with adapters, images or a salt, and those of further groups of a hybrid model, are left out.
    """

    def __init__(self, clock: Callable[[], int], known: dict[int, PrefixKeys] | None = None) -> None:
        super().__init__(PrefixKeys())
        self._clock, self._known = clock, {} if known is None else known
        self._next: int | None = None  # number of the next message; None: unknown
        self._complete = self._repeated = self._missing = False  # from message 0 on; the last one was repeated; a gap
        self._unpublished_ns: int | None = None  # since when a computed prompt's blocks are not published
        self._keys: dict[Hash, bytes] = {}
        self._gpu: set[bytes] = set()
        self._tier: set[bytes] = set()
        self.block_tokens = 0  # 0: not known yet
        self.malformed = 0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def current(self) -> bool:
        since_ns = self._unpublished_ns
        return self._complete and not self._missing and (since_ns is None or self._clock() - since_ns <= SILENT_NS)

    @property
    def next_number(self) -> int:
        """Number of the first message that is missing."""
        return (self._next or 0) if self._complete else 0

    def share(self, key: bytes) -> float:
        return 1.0 if key in self._gpu else TIER_SHARE if key in self._tier else 0.0

    def learn(self, prefix: Sequence[int], length: float, tokens: list[int]) -> None:
        """Remember which blocks a prompt has that some server has computed, for all that share its prefixes."""
        if self.block_tokens and prefix:
            self.prefixes.learn(prefix, length, tokens, self.block_tokens, _ROOT)

    def expect(self, tokens: list[int]) -> None:
        """This server has computed a prompt: its blocks are, or will be, published."""
        if self._unpublished_ns is None and self._complete:
            keys = block_keys(tokens[: self.block_tokens], self.block_tokens, _ROOT) if self.block_tokens else ()
            if len(tokens) >= max(self.block_tokens, 1) and not any(key in self._gpu for key in keys):
                self._unpublished_ns = self._clock()

    def apply(self, frames: list[bytes], *, repeated: bool = False, last: bool = False) -> bool:
        """Apply a message, or one that is `repeated` after a gap. Return whether earlier ones are missing, and the
        message is to be applied again after them; the `last` time without them."""
        if len(frames) != 3 or len(frames[1]) != 8:
            return self._reject("not three frames with a number")
        number = int.from_bytes(frames[1], "big")
        if number == 0:
            self._clear()
            self._complete = True
        elif number != self._next:
            before = self._next is not None and number < self._next
            if before and (repeated or self._repeated):
                return False  # it was applied
            if before:  # the publisher was restarted
                self._next = None
            if not (repeated or last):
                self._missing = True
                return True
            self._clear()
            self._complete = False
        self._next, self._repeated, self._missing = number + 1, repeated, False
        try:
            batch = _decode(frames[2])
            for event in batch[1]:
                self._apply_event(event if isinstance(event, dict) else _named(event))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            return self._reject(error)
        self._unpublished_ns = None
        if max(map(len, (self._keys, self._gpu, self._tier))) > MOST_KEYS:  # a name's former keys stay in the others
            self._clear()
            self._complete = False
        return False

    def _apply_event(self, event: Event) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self._clear()
        elif kind == "BlockStored" and not event.get("group_idx"):
            self._store(event)
        elif kind == "BlockRemoved" and not event.get("group_idx"):
            keys = self._place(event)
            for name in _hashes(event["block_hashes"]):
                key = self._keys.get(name)
                if key is not None:
                    keys.discard(key)
                    if key not in self._gpu and key not in self._tier:
                        del self._keys[name]

    def _store(self, event: Event) -> None:
        names, tokens, size = list(_hashes(event["block_hashes"])), event["token_ids"], event["block_size"]
        before = event["parent_block_hash"]
        if not isinstance(tokens, list) or type(size) is not int or not 1 <= size <= _MAX_BLOCK_TOKENS:
            raise ValueError("blocks of an invalid size")
        if len(names) > MOST_KEYS:
            raise ValueError(f"{len(names)} blocks at once")
        if len(tokens) != len(names) * size or not all(type(one) is int and 0 <= one < 1 << 31 for one in tokens):
            raise ValueError(f"{len(tokens)} tokens in {len(names)} blocks of {size}")
        root = _ROOT if before is None else self._keys.get(next(_hashes([before])))
        salted = any(event.get("extra_keys") or ()) or event.get("lora_id") is not None
        if not self.block_tokens:
            self.block_tokens, self.prefixes = size, self._known.setdefault(size, self.prefixes)
        if root is None or salted or size != self.block_tokens:
            return
        keys = self._place(event)
        for name, key in zip(names, block_keys(tokens, size, root), strict=True):
            self._keys[name] = key
            keys.add(key)

    def _place(self, event: Event) -> set[bytes]:
        return self._gpu if event.get("medium") in (None, "GPU") else self._tier

    def _clear(self) -> None:
        for keys in (self._keys, self._gpu, self._tier):
            keys.clear()
        self._unpublished_ns = None

    def _reject(self, reason: object) -> bool:
        if not self.malformed:
            log.warning("a malformed KV event: %s", reason)
        self.malformed += 1
        self._clear()
        self._complete = False
        return False


def _named(event: list[Any]) -> Event:
    """Return an event that is a list as a map."""
    return {"type": event[0]} | dict(zip(_FIELDS[event[0]], event[1:], strict=False))


def _hashes(names: Iterable[Any]) -> Iterator[Hash]:
    for name in names:
        if not (type(name) is int or (isinstance(name, bytes) and len(name) <= _MAX_HASH_BYTES)):
            raise ValueError(f"a block hash is {type(name).__name__}")
        yield name


async def follow(endpoints: EventEndpoints, blocks: ServerBlocks) -> None:
    """Receive a server's messages until cancelled, and request those that are missing."""
    context = zmq.asyncio.Context.instance()
    with _socket(context, zmq.SUB, endpoints.events) as events:
        events.setsockopt(zmq.SUBSCRIBE, b"")
        if endpoints.replay:
            await _replay(context, endpoints.replay, blocks)
        known = False
        while True:
            frames = await events.recv_multipart()
            await asyncio.sleep(0)  # receiving queued messages does not yield
            if blocks.apply(frames):
                if endpoints.replay:
                    await _replay(context, endpoints.replay, blocks)
                blocks.apply(frames, last=True)
            if blocks.current != known:
                known = blocks.current
                log.info(
                    "%s: requests are routed by what %s", endpoints.events, "it has" if known else "was sent there"
                )


async def _replay(context: zmq.asyncio.Context, endpoint: str, blocks: ServerBlocks) -> None:
    """Request the missed messages; without an answer the server's account stays incomplete."""
    try:
        async with asyncio.timeout(_REPLAY_S):
            with _socket(context, zmq.DEALER, endpoint) as replay:
                await replay.send_multipart([b"", blocks.next_number.to_bytes(8, "big")])
                for _ in range(_MOST_REPLAYED):
                    frames = await replay.recv_multipart()
                    await asyncio.sleep(0)
                    if len(frames) not in (3, 4) or frames[-2] == _END:
                        return
                    blocks.apply([b"", *frames[-2:]], repeated=True)
    except TimeoutError:
        log.info("%s repeats no KV events", endpoint)


def _socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
    socket.connect(endpoint)
    return socket
