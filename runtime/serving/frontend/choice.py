"""The rule by which a worker, or a model server, is chosen for a prompt. No sockets, no clock.

The one with the lowest cost: the requests waiting or running there, less the prefix overlap (the share of the prompt's
leading blocks that it has cached, by its own account, or has lately received while that is unknown), plus one if its KV
cache has no room. A full overlap offsets as many requests as `overlap_weight`, 1 by default, so a hot prefix cannot
starve the others, and the turns of a conversation stay where its KV is; with 0 only the load counts. Ties go to the
least recently chosen, so that a new worker receives a request at once.

Reports lag, so the load is the larger of what is reported and what was assigned from here.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from runtime.serving.frontend.cached_blocks import CachedBlocks
from runtime.serving.messages import Message

# ---- prefix hashes, to find the worker or server with cached KV of a prompt


BLOCK_CHARS = 128
BLOCK_TOKENS = 32
PREFIX_BLOCKS = 1024  # of one prompt, 32,768 tokens; later blocks do not affect routing


def prefix_blocks(prompt: str | Sequence[int] | Sequence[Message], salt: bytes = b"") -> tuple[int, ...]:
    """Return chained hashes of the prompt's leading whole blocks: equal hashes mean equal prefixes.

    Blocks are 128 characters of text (a chat's turns joined) or 32 token ids; at most `PREFIX_BLOCKS` blocks.
    Only prompts with the same `salt` share any. The hashes of text hold within one process only.
    """
    content: str | Sequence[int]
    if isinstance(prompt, str):
        content, block = prompt, BLOCK_CHARS
    elif prompt and isinstance(prompt[0], Message):
        turns = (f"{turn.role}\0{turn.content}\0" for turn in prompt if isinstance(turn, Message))
        content, block = "".join(turns), BLOCK_CHARS
    else:
        content, block = tuple(token for token in prompt if isinstance(token, int)), BLOCK_TOKENS
    hashes: list[int] = []
    chain = hash((block, salt))
    for end in range(block, min(len(content), PREFIX_BLOCKS * block) + 1, block):
        chain = hash((chain, content[end - block : end]))
        hashes.append(chain)
    return tuple(hashes)


class PrefixHistory:
    """LRU set of the prefix blocks lately sent to one worker or server."""

    def __init__(self) -> None:
        self._sent: OrderedDict[int, None] = OrderedDict()  # LRU first

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, block: int) -> bool:
        return block in self._sent

    def seen(self, prefix: Sequence[int]) -> int:
        """Return how many leading blocks of `prefix` were sent; hashes are chained, so a miss ends the match."""
        return next((at for at, block in enumerate(prefix) if block not in self._sent), len(prefix))

    def remember(self, prefix: Sequence[int], limit: int) -> None:
        """Add a prompt's blocks and evict the least recently used beyond `limit`."""
        for block in reversed(prefix):  # the first block last: a chain is evicted from its end
            self._sent[block] = None
            self._sent.move_to_end(block)
        while len(self._sent) > limit:
            self._sent.popitem(last=False)


@dataclass(slots=True, eq=False, kw_only=True)
class Candidate:
    """A worker or server that may be chosen: the requests assigned to it and their prefixes.

    `cached`: what it says it has cached; None if it never says."""

    assigned: int = 0
    last_chosen: int = 0  # sequence number of the choice
    cached: CachedBlocks | None = None
    prefixes: PrefixHistory = field(default_factory=PrefixHistory)

    @property
    def reported_load(self) -> int:
        """The requests that it reports, waiting and running."""
        raise NotImplementedError

    @property
    def load(self) -> int:
        """Number of requests there or on their way to it."""
        return max(self.reported_load, self.assigned)

    def overlap(self, prefix: Sequence[int], blocks: int = 0) -> float:
        """Return the share of a prompt that need not be computed there, 0..1: that it has cached, if it says so, else
        that it has lately received.

        The prompt has max(`blocks`, len(`prefix`)) blocks, of which `prefix` are known.
        """
        if not prefix:
            return 0.0
        saved: float
        if self.cached is not None and self.cached.current:
            saved = self.cached.saved(prefix, self.prefixes.__contains__)
        else:
            saved = self.prefixes.seen(prefix)
        return saved / max(blocks, len(prefix))


C = TypeVar("C", bound=Candidate)


class Choice:
    """Chooses by the rule. `overlap_weight`: the requests that a full overlap offsets."""

    def __init__(self, overlap_weight: float = 1.0) -> None:
        self._overlap_weight = overlap_weight
        self._choices = 0

    def cost(self, candidate: Candidate, prefix: Sequence[int], blocks: int = 0, *, full: bool = False) -> float:
        """Return the cost of one more request there. full: it may have to wait for room in the KV cache."""
        return candidate.load - self._overlap_weight * candidate.overlap(prefix, blocks) + full

    def choose(self, candidates: Iterable[C], order: Callable[[C], tuple[float, ...]]) -> C:
        """Return the candidate that is first in this order, ties by the least recent choice."""
        chosen = min(candidates, key=lambda candidate: (*order(candidate), candidate.last_chosen))
        self._choices += 1
        chosen.last_chosen = self._choices
        return chosen
