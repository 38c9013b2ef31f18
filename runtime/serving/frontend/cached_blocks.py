"""What workers and servers have cached, by their own account, for the rule by which one is chosen (`choice.py`).

A prompt is text here, and a worker caches blocks of tokens. To tokenize each prompt here too would cost the event loop
20 ms per 2,500 tokens (measured on a busy core), so the gateway learns instead: when a prompt has been computed, its
token ids are known here, and its blocks of text are mapped to the hashes of the KV blocks at the same place
(`PrefixKeys`). Text that was never computed is cached nowhere, so nothing is lost with it.

```
batches of fills and evictions ──▶ CachedBlocks, of a worker ──┐
a computed prompt's token ids ───▶ PrefixKeys, of all ─────────┴─▶ share of a prompt that is cached there
```
A view is `current` from a batch that begins until one is missing. Meanwhile, and without batches, the worker is judged
by what was sent to it.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence

from runtime.serving.kv.blocks import KEY_BYTES, block_keys
from runtime.serving.messages import Cached

MOST_KEYS = 1 << 18  # of one worker: about 30 MB; one with more blocks is judged by what was sent to it
_PREFIX_KEYS = 1 << 16  # blocks of text whose keys are remembered


class PrefixKeys:
    """The KV block keys of leading blocks of text, of all computed prompts: at most 65,536, the latest used."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, block: int) -> bytes | None:
        """Return the key of the KV block in which a block of text ends; None if it was never computed."""
        return self._keys.get(block)

    def add(self, prefix: Sequence[int], keys: Sequence[bytes]) -> None:
        """Remember the keys of a prompt's leading blocks of text."""
        for block, key in zip(reversed(prefix), reversed(keys), strict=True):  # the first block is forgotten last
            self._keys[block] = key
            self._keys.move_to_end(block)
        while len(self._keys) > _PREFIX_KEYS:
            self._keys.popitem(last=False)

    def learn(
        self, prefix: Sequence[int], length: float, tokens: Sequence[int], block_tokens: int, root: bytes
    ) -> None:
        """Map a prompt's blocks of text to its tokens' blocks, as if each character had equally many tokens.

        `prefix` are the leading ones of `length` blocks of text, whose `tokens` are known: exact if they are blocks of
        tokens themselves, else a few tokens off, which may move the end of a match by a block.
        """
        per_block = len(tokens) / max(length, 1e-9)  # tokens of a block of text
        most = int(len(prefix) * per_block) + block_tokens
        keys = list(block_keys(tokens[:most], block_tokens, root))
        if keys:
            ends = (int(number * per_block) // block_tokens for number in range(1, len(prefix) + 1))
            self.add(prefix, [keys[min(max(end, 1), len(keys)) - 1] for end in ends])


class CachedBlocks(ABC):
    """The blocks that one worker or server has cached, as keys; `prefixes` are those of prompts."""

    def __init__(self, prefixes: PrefixKeys) -> None:
        self.prefixes = prefixes

    @property
    @abstractmethod
    def current(self) -> bool:
        """Whether it is known what is cached there."""

    @abstractmethod
    def share(self, key: bytes) -> float:
        """Return the share of a block's computing time that is saved there: 1 if it is cached, less if it is loaded
        from a tier, else 0."""

    def saved(self, prefix: Sequence[int], sent: Callable[[int], bool]) -> float:
        """Return how many leading blocks need not be computed there. A block that was never computed is on its way
        there if it was `sent`."""
        saved = 0.0
        for block in prefix:
            key = self.prefixes.get(block)
            share = float(sent(block)) if key is None else self.share(key)
            if not share:
                break
            saved += share
        return saved


class WorkerBlocks(CachedBlocks):
    """Of one of the node's own workers, which has at most `most` blocks.

    A batch may name blocks in place of those whose eviction a later batch tells: a view may hold three times as many
    (`BlockEvents` never keeps more than two changes a block).

    `in_tier` returns whether the node's host tier, which its workers share, has a block. `load_saves`: what loading
    one from there saves, as the worker has measured.
    """

    def __init__(self, prefixes: PrefixKeys, most: int, in_tier: Callable[[bytes], bool]) -> None:
        super().__init__(prefixes)
        self._most, self._in_tier = min(3 * most, MOST_KEYS), in_tier
        self._too_many = False
        self._keys: set[bytes] = set()
        self._current = False
        self.number = 0  # of the last batch
        self.load_saves = 0.0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def current(self) -> bool:
        return self._current

    def share(self, key: bytes) -> float:
        if key in self._keys:
            return 1.0
        return self.load_saves if self.load_saves > 0.0 and self._in_tier(key) else 0.0

    @property
    def incomplete(self) -> bool:
        """Whether a list of all blocks would make the view current."""
        return not self._current and not self._too_many

    def apply(self, batch: Cached) -> None:
        """Apply a batch. The view is void after one that does not follow the last, or names more blocks than the
        worker has."""
        if batch.begins:
            self._keys, self.number, self._current = set(), batch.number - 1, True
        self.expect(batch.number - 1)
        if not self._current:
            return
        self.number = batch.number
        self._keys.update(_split(batch.stored))
        self._keys.difference_update(_split(batch.evicted))
        if len(self._keys) > self._most:
            self._too_many = True
            self._void()

    def expect(self, number: int) -> None:
        """The worker has sent the batches up to this `number`: if one is missing, the view is void."""
        if number != self.number:
            self._void()

    def _void(self) -> None:
        self._keys, self._current = set(), False


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys) - KEY_BYTES + 1, KEY_BYTES)]
