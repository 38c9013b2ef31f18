"""KV block manager: allocation of the blocks of a KV tensor to sequences, and prefix caching.

A block holds the KV of `block_tokens` consecutive tokens. A sequence has a `BlockTable`: position p lies in
`table.blocks[p // block_tokens]`. A full block is identified by a hash over all tokens up to its end, chained from the
model's identity, so equal hashes mean equal KV. A sequence that begins with the same tokens takes a reference to that
block instead of computing it. Only full blocks are shared and sequences only append, so a shared block is never
written. A block without references becomes free or, if its hash is registered, stays *cached* until it is evicted:
least recently used first, and the end of a chain before its beginning.

```
free ──grow──▶ held (1 table) ──fill──▶ held, hash registered ◀──open── other tables
  ▲               │ close                    │ close, last reference
  └───────────────┘                          ▼
  └────────────evicted by grow──────────── cached ──open──▶ held
```
Bookkeeping only: this module does not access KV memory.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

KEY_BYTES = 16


def chain_root(identity: bytes, salt: bytes = b"") -> bytes:
    """Return what the hashes of a sequence are chained from: the model's identity, and the sequence's salt if any."""
    return blake2b(salt + identity, digest_size=KEY_BYTES).digest() if salt else identity


def block_keys(tokens: Sequence[int], block_tokens: int, root: bytes) -> Iterator[bytes]:
    """Yield the hashes of the full blocks of `tokens`, each over all tokens up to its end."""
    chain = root
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        chain = _chained(chain, tokens[end - block_tokens : end])
        yield chain


def _chained(chain: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(chain + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()


class OutOfBlocks(Exception):
    """Raised if fewer blocks are available than requested. Nothing has been allocated."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks are needed, {available} are available")
        self.needed = needed
        self.available = available


@dataclass(eq=False, slots=True)
class BlockTable:
    """The blocks of one sequence, in order. The KV of its first `reused_tokens` tokens was cached when it was opened.

    `chain` holds the hashes of its full blocks that `fill` has registered, chained from `root`.
    """

    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    reused_tokens: int = 0
    root: bytes = b""


class BlockManager:
    """Manages `blocks` blocks of `block_tokens` tokens. Hashes depend on the model's `identity` and on a sequence's
    `salt`: sequences that differ in either share no block.

    If `before_eviction` is set, `unsaved` maps the hashes of registered blocks that no tier has stored yet to the
    blocks, oldest first, and `before_eviction` is called before one of them is evicted. `on_change` is called with the
    hash of a block that is registered (True) or evicted. Counters: tokens looked up in `open`, tokens found, and
    evicted blocks.
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
        self._registered: dict[bytes, int] = {}  # hash → its block
        self._cached: OrderedDict[int, None] = OrderedDict()  # blocks; least recently used first
        self.unsaved: OrderedDict[bytes, int] = OrderedDict()
        self.before_eviction: Callable[[bytes, int], None] | None = None
        self.on_change: Callable[[bytes, bool], None] | None = None
        self.lookup_tokens = self.hit_tokens = self.evictions = 0

    @property
    def available(self) -> int:
        """Number of blocks that `grow` can allocate: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def registered(self) -> Collection[bytes]:
        """The hashes of all registered blocks."""
        return self._registered.keys()

    @property
    def held(self) -> int:
        """Number of blocks that a table refers to."""
        return self.total - self.available

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_tokens)

    def cached_tokens(self, tokens: Sequence[int], compute: int = 1, salt: bytes = b"") -> int:
        """Return how many leading tokens `open` would find now. Takes no reference."""
        return len(self._match(tokens, compute, self._root(salt))) * self.block_tokens

    def blocks_needed(self, tokens: Sequence[int], compute: int = 1, salt: bytes = b"") -> int:
        """Return how many available blocks `open` and then `grow(table, len(tokens))` would take together."""
        matched = self._match(tokens, compute, self._root(salt))
        revived = sum(block in self._cached for _, block in matched)
        return self.blocks_for(len(tokens)) - len(matched) + revived

    def open(self, tokens: Sequence[int], compute: int = 1, salt: bytes = b"") -> BlockTable:
        """Return a table with references to the registered blocks of a prefix of `tokens`. `close` it in the end.

        The last `compute` tokens are not looked up: a model must compute at least one token to predict the next.
        """
        root = self._root(salt)
        matched = self._match(tokens, compute, root)
        table = BlockTable(reused_tokens=len(matched) * self.block_tokens, root=root)
        for hash_, block in matched:
            self._cached.pop(block, None)
            self._references[block] += 1
            table.blocks.append(block)
            table.chain.append(hash_)
        self.lookup_tokens += len(tokens)
        self.hit_tokens += table.reused_tokens
        return table

    def grow(self, table: BlockTable, tokens: int) -> None:
        """Extend the table to `tokens` tokens in total. Raises `OutOfBlocks` and then changes nothing."""
        needed = self.blocks_for(tokens) - len(table.blocks)
        if needed > self.available:
            raise OutOfBlocks(needed, self.available)
        for _ in range(needed):
            if not self._free:
                self._evict()
            block = self._free.pop()
            self._references[block] = 1
            table.blocks.append(block)

    def fill(self, table: BlockTable, tokens: Sequence[int], written: int) -> None:
        """Register the full blocks of the table for sharing: the KV of the first `written` of `tokens` is written."""
        first = len(table.chain)
        new = tokens[first * self.block_tokens : min(written, len(table.blocks) * self.block_tokens)]
        keys = block_keys(new, self.block_tokens, table.chain[-1] if table.chain else table.root)
        for number, hash_ in enumerate(keys, first):
            table.chain.append(hash_)
            if (
                hash_ not in self._registered
            ):  # else another sequence computed the same tokens: this block stays private
                self._registered[hash_] = table.blocks[number]
                self._hashes[table.blocks[number]] = hash_
                if self.before_eviction is not None:
                    self.unsaved[hash_] = table.blocks[number]
                if self.on_change is not None:
                    self.on_change(hash_, True)

    def close(self, table: BlockTable, *, save: bool = True) -> None:
        """Release the table's references. Idempotent. `save`: tiers still store the blocks that no other table has."""
        for block in reversed(table.blocks):  # the end of the chain first: it is also evicted first
            self._references[block] -= 1
            hash_ = self._hashes[block]
            if self._references[block] == 0:
                if hash_ is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
                    if not save:
                        self.unsaved.pop(hash_, None)
        table.blocks, table.chain = [], []

    def keys(self, tokens: Sequence[int], compute: int = 1, *, salt: bytes = b"", root: bytes = b"") -> Iterator[bytes]:
        """Iterate over the hashes of the full blocks of `tokens` without the last `compute` ones. `root`: that of a
        table."""
        return block_keys(tokens[: max(0, len(tokens) - compute)], self.block_tokens, root or self._root(salt))

    def row_keys(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """Return the hashes of all blocks of `tokens`, also of the last one if it is partial."""
        keys = list(self.keys(tokens, 0, salt=salt))
        if rest := tokens[len(keys) * self.block_tokens :]:
            keys.append(_chained(keys[-1] if keys else self._root(salt), rest))
        return keys

    def _match(self, tokens: Sequence[int], compute: int, root: bytes) -> list[tuple[bytes, int]]:
        matched: list[tuple[bytes, int]] = []
        for key in self.keys(tokens, compute, root=root):
            block = self._registered.get(key)
            if block is None:
                break
            matched.append((key, block))
        return matched

    def _root(self, salt: bytes) -> bytes:
        return chain_root(self._identity, salt)

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        hash_ = self._hashes[block]
        assert hash_ is not None, "a cached block has a registered hash"
        if self.unsaved.pop(hash_, None) is not None and self.before_eviction is not None:
            self.before_eviction(hash_, block)
        del self._registered[hash_]
        self._hashes[block] = None
        self._free.append(block)
        self.evictions += 1
        if self.on_change is not None:
            self.on_change(hash_, False)
