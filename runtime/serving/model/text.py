"""Text into tokens and back: prompts with passages in them, and the text of an answer while it grows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runtime.errors import ContextLengthExceeded
from runtime.node.retrieval_config import PassagePlace
from runtime.retrieval.passages import Passage
from runtime.serving.messages import Message

if TYPE_CHECKING:
    from runtime.serving.model.tokenizer import Tokenizer


# ---- prompts, with passages in front, and passages as a chunk in the middle of an answer

_INSTRUCTION = "Answer the question with the help of these passages."
_FEWEST_TOKENS = 16  # of a passage that is cut: less of one says nothing
_FRAME_TOKENS = 64  # about what the instruction adds, and its place in a chat, at the most


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the passages that found a place in them, best first (the last may have been cut)."""

    tokens: list[int]
    used: tuple[Passage, ...] = ()


def prompt_budget(context_tokens: int, max_tokens: int) -> int:
    """The tokens that an answer leaves for its prompt. Raises `ContextLengthExceeded` if it leaves none."""
    if max_tokens >= context_tokens:
        raise ContextLengthExceeded(
            f"max_tokens = {max_tokens} leaves no room for a prompt in {context_tokens}", "max_tokens"
        )
    return context_tokens - max_tokens


def query_text(tokenizer: "Tokenizer", messages: Sequence[Message], prompt: str | Sequence[int]) -> str:
    """What to search for: the last message of the user, or the prompt's text."""
    if messages:
        return last_question(messages)
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


def last_question(messages: Sequence[Message]) -> str:
    """The last message of the user, or the last of all."""
    return messages[last_question_index([message.role for message in messages])].content


def build_prompt(
    tokenizer: "Tokenizer",
    messages: Sequence[Message] = (),
    prompt: str | Sequence[int] = "",
    passages: Sequence[Passage] = (),
    *,
    budget_tokens: int,
    passage_tokens: int | None = None,
    bare: Sequence[int] | None = None,
    place: PassagePlace = "system",
) -> Prompt:
    """The tokens of a chat (its template rendered) or of a raw prompt, with passages in front, at most `budget_tokens`.

    Passages become part of the system message, or of the last question (`place`), or a block before a raw prompt. They
    get what the request leaves of the budget, at most `passage_tokens`: the best come first, the last is cut, the rest
    is dropped. `bare` are the tokens without passages, for who has them already: a long text is not tokenized again.
    Raises `ContextLengthExceeded` if the request alone is over the budget.
    """
    bare = _render(tokenizer, messages, prompt, "") if bare is None else list(bare)
    if len(bare) > budget_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(bare)} tokens; {budget_tokens} are left for it in the model's context",
            "messages" if messages else "prompt",
        )
    room = budget_tokens - len(bare) - _FRAME_TOKENS
    if passages and (passage_tokens is None or room < passage_tokens):  # the budget binds: count exactly
        room = budget_tokens - len(_render(tokenizer, messages, prompt, passages_block([]), place))
    if passage_tokens is not None:
        room = min(room, passage_tokens)
    while True:
        texts, used = _fit(tokenizer, passages, room)
        if not used:
            return Prompt(bare)
        tokens = _render(tokenizer, messages, prompt, passages_block(texts), place)
        excess = len(tokens) - budget_tokens
        if excess <= 0:
            return Prompt(tokens, used)
        room -= excess  # tokens can split differently where texts meet: take that much less


def passages_chunk(tokenizer: "Tokenizer", passages: Sequence[Passage], budget_tokens: int) -> Prompt:
    """At most `budget_tokens` tokens that bring passages found by a probe into the middle of an answer.

    To append them: the last sampled token has not been through the model yet. Feed these tokens at its position and
    it behind them; the answer then goes on from it. Without room for any passage there are no tokens.
    """
    room = budget_tokens
    while True:
        texts, used = _fit(tokenizer, passages, room)
        if not used:
            return Prompt([])
        tokens = tokenizer.encode("\n\n" + "\n\n".join(texts) + "\n\n")
        if len(tokens) <= budget_tokens:
            return Prompt(tokens, used)
        room -= len(tokens) - budget_tokens


def _fit(tokenizer: "Tokenizer", passages: Sequence[Passage], room: int) -> tuple[list[str], tuple[Passage, ...]]:
    """Texts of the best passages, which come first, that have about `room` tokens, the last one cut; and these."""
    texts: list[str] = []
    used: list[Passage] = []
    for passage in passages:
        text = passage_text(passage.title, passage.text)
        ids = tokenizer.encode(text + "\n\n")
        if len(ids) <= room:
            texts.append(text)
            used.append(passage)
            room -= len(ids)
            continue
        if room >= _FEWEST_TOKENS:
            texts.append(tokenizer.decode(ids[: room - 1]).rstrip("\ufffd \n"))  # one token for the line's end
            used.append(passage)
        break
    return texts, tuple(used)


def passage_text(title: str, text: str) -> str:
    """A passage as the model reads it."""
    title, text = title.strip(), text.strip()
    return f"[{title}]\n{text}" if title else text


def passages_block(texts: Sequence[str]) -> str:
    """The text that brings passages to the model before a prompt, or in a chat's system turn."""
    return "\n\n".join([_INSTRUCTION, *texts])


def _render(
    tokenizer: "Tokenizer",
    messages: Sequence[Message],
    prompt: str | Sequence[int],
    block: str,
    place: PassagePlace = "system",
) -> list[int]:
    """The request's tokens, with `block` in its chat or before it, unless it is empty."""
    if messages:
        return tokenizer.chat(_with_block(messages, block, place) if block else messages)
    before = f"{block}\n\n" if block else ""
    if isinstance(prompt, str):
        return tokenizer.prompt(prompt, before)
    return (tokenizer.prompt("", before) if before else []) + list(prompt)


def last_question_index(roles: Sequence[str]) -> int:
    """Which of a chat's messages is the last question: the last of the user, or of all; -1 without any."""
    return max((place for place, role in enumerate(roles) if role == "user"), default=len(roles) - 1)


def _with_block(messages: Sequence[Message], block: str, place: PassagePlace) -> list[Message]:
    if place == "question":
        last = last_question_index([message.role for message in messages])
        asked = Message(messages[last].role, f"{block}\n\n{messages[last].content}")
        return [*messages[:last], asked, *messages[last + 1 :]]
    first, *rest = messages
    if first.role == "system":
        return [Message("system", f"{first.content}\n\n{block}"), *rest]
    return [Message("system", block), first, *rest]


# ---- answers: token ids in, text that no later token can change out

_HALF = "\ufffd"  # what a tokenizer makes of bytes that are no character, or not yet


class Decoder(Protocol):
    """What `TextStream` needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""


class StopStrings:
    """Looks for stop strings in a growing text. The beginning of what may become one is held back."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.stopped = False

    def push(self, fresh: str) -> str:
        """What is certain now: up to a stop string, or to where one may begin; nothing once one has come."""
        if self.stopped:
            return ""
        text = self._held + fresh
        found = [(begin + len(stop), begin) for stop in self._stop if (begin := text.find(stop)) >= 0]
        if found:
            # The one that was complete first counts, so that it does not matter how many tokens come at a time.
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """The text of one answer. All pieces together are what decoding all tokens at once gives, cut at a stop string.

    A character whose bytes are not all there is held back, and so is the beginning of what may become a stop string.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop)
        self._ids: list[int] = []  # the window: tokens from the last whole character's token on
        self._context = 0  # that token only gives context (some decoders treat a text's first token differently)
        self._told = 0  # characters of the window's text that have left it

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens made certain; nothing once a stop string has come."""
        if self.stopped or not token_ids:
            return ""
        self._ids += token_ids
        text = self._tokenizer.decode(self._ids)
        whole = len(text) - text.endswith(_HALF)
        fresh = text[self._told : whole]
        self._told = max(self._told, whole)
        if whole == len(text):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._told = len(self._tokenizer.decode(self._ids))
        return self._stops.push(fresh)

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._tokenizer.decode(self._ids)[self._told :]
        self._ids, self._context, self._told = [], 0, 0
        return self._stops.push(rest) + self._stops.flush()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
