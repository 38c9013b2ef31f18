"""The block manager: which blocks of a KV tensor belong to which sequence, and which hold a prefix worth keeping.

A block holds the KV of `block_tokens` consecutive tokens. A sequence has a `BlockTable`: position p lies in
`table.blocks[p // block_tokens]`. A full block is known by a hash over all tokens up to its end, chained from the
model's identity, so equal hashes mean equal KV; a sequence that begins with the same tokens takes a reference on the
same block instead of computing it. Only full blocks are shared and sequences only append, so a shared block is never
written. A block without references goes back to the free ones, or, if its hash is known, stays as *cached* until its
room is needed: the longest unused goes first, the far end of a chain before its beginning.

```
free ──grow──▶ held (1 table) ──fill──▶ held, known by its hash ◀──open── other tables
  ▲               │ close                    │ close, last reference
  └───────────────┘                          ▼
  └────────────evicted by grow──────────── cached ──open──▶ held
```
Pure bookkeeping: no memory is touched here.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

_HASH_BYTES = 16


class OutOfBlocks(Exception):
    """There are not as many free and cached blocks as were asked for. Nothing was taken."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} KV blocks are needed, {available} can be had")
        self.wanted = wanted
        self.available = available


@dataclass(eq=False, slots=True)
class BlockTable:
    """The blocks of one sequence, in order. The KV of its first `reused_tokens` tokens was cached when it was opened.

    `chain` holds the hashes of its full blocks that `fill` has registered, chained from `root`. `requested_ns` is the
    time at which the request arrived.
    """

    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    reused_tokens: int = 0
    requested_ns: int = 0
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """Blocks by state, and counters: tokens looked up in `open`, those found, and cached blocks given up."""

    total: int
    free: int
    cached: int
    held: int
    lookup_tokens: int
    hit_tokens: int
    evictions: int


class BlockManager:
    """`blocks` blocks of `block_tokens` tokens. `identity` names the model: two models never share a hash, and of one
    model no two sequences with different `salt`.

    With `before_eviction`, which is then called before such a block is given up, `unsaved` are the known blocks that
    nobody has taken out of there yet, by hash, the oldest first.
    """

    def __init__(self, blocks: int, block_tokens: int, identity: bytes) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"{blocks} blocks of {block_tokens} tokens: both must be at least 1")
        self.total = blocks
        self.block_tokens = block_tokens
        self._identity = identity
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._hashes: list[bytes | None] = [None] * blocks
        self._known: dict[bytes, int] = {}  # hash → its block
        self._cached: OrderedDict[int, int] = OrderedDict()  # known, without references; the longest unused first
        self.unsaved: OrderedDict[bytes, int] = OrderedDict()
        self.before_eviction: Callable[[bytes, int], None] | None = None
        self.evicted_ns = 0  # when the latest request came of whose blocks one was given up
        self._lookup_tokens = self._hit_tokens = self._evictions = 0

    @property
    def available(self) -> int:
        """Blocks that `grow` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        """Blocks that some table refers to."""
        return self.total - self.available

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.block_tokens)

    def cached_tokens(self, tokens: Sequence[int], compute: int = 1, salt: bytes = b"") -> int:
        """How many leading tokens `open` would find now. Takes nothing."""
        return len(self._match(tokens, compute, self._root(salt))) * self.block_tokens

    def blocks_needed(self, tokens: Sequence[int], compute: int = 1, salt: bytes = b"") -> int:
        """How many of the available blocks `open` and then `grow(table, len(tokens))` would take together."""
        matched = self._match(tokens, compute, self._root(salt))
        revived = sum(block in self._cached for _, block in matched)
        return self.blocks_for(len(tokens)) - len(matched) + revived

    def open(self, tokens: Sequence[int], compute: int = 1, salt: bytes = b"") -> BlockTable:
        """A table with references on the known blocks that `tokens` begin with; `close` it in the end.

        The last `compute` tokens are left out: a model must run at least one token to say what follows.
        """
        root = self._root(salt)
        matched = self._match(tokens, compute, root)
        table = BlockTable(reused_tokens=len(matched) * self.block_tokens, root=root)
        for hash_, block in matched:
            self._cached.pop(block, None)
            self._references[block] += 1
            table.blocks.append(block)
            table.chain.append(hash_)
        self._lookup_tokens += len(tokens)
        self._hit_tokens += table.reused_tokens
        return table

    def grow(self, table: BlockTable, tokens: int) -> None:
        """Give the table blocks for `tokens` tokens in all. Raises `OutOfBlocks`, and then nothing has changed."""
        wanted = self.blocks_for(tokens) - len(table.blocks)
        if wanted > self.available:
            raise OutOfBlocks(wanted, self.available)
        for _ in range(wanted):
            if not self._free:
                self._evict()
            block = self._free.pop()
            self._references[block] = 1
            table.blocks.append(block)

    def fill(self, table: BlockTable, tokens: Sequence[int], written: int) -> None:
        """The KV of the first `written` of `tokens` is in the table's blocks: its full ones can be shared now."""
        for number in range(len(table.chain), min(written // self.block_tokens, len(table.blocks))):
            before = table.chain[-1] if table.chain else table.root
            hash_ = self._hash(before, tokens, number)
            table.chain.append(hash_)
            if hash_ not in self._known:  # else the same tokens were computed twice: ours stays private
                self._known[hash_] = table.blocks[number]
                self._hashes[table.blocks[number]] = hash_
                if self.before_eviction is not None:
                    self.unsaved[hash_] = table.blocks[number]

    def close(self, table: BlockTable) -> None:
        """Give the table's references back. A table that is closed already is left alone."""
        for block in reversed(table.blocks):  # the far end first: it is also given up first
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = table.requested_ns
        table.blocks, table.chain = [], []

    def statistics(self) -> BlockStatistics:
        """Counters; cheap."""
        return BlockStatistics(
            total=self.total,
            free=len(self._free),
            cached=len(self._cached),
            held=self.held,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            evictions=self._evictions,
        )

    def keys(self, tokens: Sequence[int], compute: int = 1, *, salt: bytes = b"", root: bytes = b"") -> Iterator[bytes]:
        """The hashes of the full blocks of `tokens`, the last `compute` of them left out; `root`: a table's."""
        chain = root or self._root(salt)
        for number in range(max(0, len(tokens) - compute) // self.block_tokens):
            chain = self._hash(chain, tokens, number)
            yield chain

    def _match(self, tokens: Sequence[int], compute: int, root: bytes) -> list[tuple[bytes, int]]:
        matched: list[tuple[bytes, int]] = []
        for key in self.keys(tokens, compute, root=root):
            block = self._known.get(key)
            if block is None:
                break
            matched.append((key, block))
        return matched

    def _root(self, salt: bytes) -> bytes:
        return blake2b(salt + self._identity, digest_size=_HASH_BYTES).digest() if salt else self._identity

    def _hash(self, before: bytes, tokens: Sequence[int], number: int) -> bytes:
        content = array("q", tokens[number * self.block_tokens : (number + 1) * self.block_tokens])
        return blake2b(before + content.tobytes(), digest_size=_HASH_BYTES).digest()

    def _evict(self) -> None:
        block, requested_ns = self._cached.popitem(last=False)
        self.evicted_ns = max(self.evicted_ns, requested_ns)
        hash_ = self._hashes[block]
        assert hash_ is not None, "a cached block is known by its hash"
        if self.unsaved.pop(hash_, None) is not None and self.before_eviction is not None:
            self.before_eviction(hash_, block)
        del self._known[hash_]
        self._hashes[block] = None
        self._free.append(block)
        self._evictions += 1
