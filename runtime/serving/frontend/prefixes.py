"""Prefixes of prompts, by which requests find the worker or the server that has their KV already."""

from collections import OrderedDict
from collections.abc import Sequence

from runtime.serving.messages import Generation, Message

BLOCK_CHARS = 128
BLOCK_TOKENS = 32
PREFIX_BLOCKS = 32  # of one prompt; what lies behind them does not choose the worker


def prefix_blocks(
    prompt: str | Sequence[int] | Sequence[Message], most: int = PREFIX_BLOCKS, salt: bytes = b""
) -> tuple[int, ...]:
    """Hashes of the prompt's leading whole blocks, each over all before it: equal hashes mean equal prefixes.

    Blocks are 128 characters of text (a chat's turns joined) or 32 token ids; at most `most` blocks. Only
    prompts with the same `salt` share any. The hashes of text hold within one process only.
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
    for end in range(block, min(len(content), most * block) + 1, block):
        chain = hash((chain, content[end - block : end]))
        hashes.append(chain)
    return tuple(hashes)


def known_prefix(asked: Generation) -> tuple[tuple[int, ...], int]:
    """The prefix blocks of a prompt that are known before its passages are, and how many blocks it has without these.

    Passages stand behind the text of a chat's system message, or before a raw prompt (`model/prompt.py`): what follows
    them is no prefix that two prompts share.
    """
    if asked.retrieval is None:
        prefix = prefix_blocks(asked.messages or asked.prompt, salt=asked.salt)
        return prefix, len(prefix)
    before = [turn for turn in asked.messages[:1] if turn.role == "system"]
    if asked.messages:
        whole = sum(len(turn.content) for turn in asked.messages) // BLOCK_CHARS
    else:
        whole = len(asked.prompt) // (BLOCK_CHARS if isinstance(asked.prompt, str) else BLOCK_TOKENS)
    return prefix_blocks(before, salt=asked.salt), whole


class Prefixes:
    """The blocks that somebody was given lately."""

    def __init__(self) -> None:
        self._given: OrderedDict[int, int] = OrderedDict()  # block → when it was last given, the longest unused first

    def __len__(self) -> int:
        return len(self._given)

    def seen(self, prefix: Sequence[int], since_ns: int = 0) -> int:
        """How many leading blocks of `prefix` were given since then (prefixes are chains: the first miss ends it)."""
        count = 0
        for block in prefix:
            if self._given.get(block, -1) < since_ns:
                break
            count += 1
        return count

    def remember(self, prefix: Sequence[int], limit: int, now_ns: int) -> None:
        """Note a prompt's blocks, forgetting the longest unused beyond `limit`."""
        for block in reversed(prefix):  # the first block last: a chain is forgotten from its far end
            self._given[block] = now_ns
            self._given.move_to_end(block)
        while len(self._given) > limit:
            self._given.popitem(last=False)
