"""Prompts with retrieved passages, and the streamed text of answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.errors import ContextLengthExceeded
from runtime.retrieval.passages import Passage
from runtime.serving.messages import Message

if TYPE_CHECKING:
    from runtime.serving.model.tokenizer import Tokenizer


# ---- prompts with passages, and passages inserted into an answer

_INSTRUCTION = "Answer the question with the help of these passages."
_MIN_PASSAGE_TOKENS = 16  # shortest useful part of a truncated passage
_FRAME_TOKENS = 64  # upper estimate of the tokens that the instruction and its chat template markers add


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the passages in them, best first, with their texts there (the last one may be truncated)."""

    tokens: list[int]
    used: tuple[Passage, ...] = ()
    texts: tuple[str, ...] = ()


def prompt_budget(context_tokens: int, max_tokens: int) -> int:
    """Return how many tokens an answer leaves for its prompt. Raises `ContextLengthExceeded` if none."""
    if max_tokens >= context_tokens:
        raise ContextLengthExceeded(
            f"max_tokens = {max_tokens} leaves no room for a prompt in a context of {context_tokens} tokens",
            "max_tokens",
        )
    return context_tokens - max_tokens


def query_text(tokenizer: "Tokenizer", messages: Sequence[Message], prompt: str | Sequence[int]) -> str:
    """Return the text of the retrieval query: the last user message, or the prompt's text."""
    if messages:
        return last_question(messages)
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


def last_question(messages: Sequence[Message]) -> str:
    """Return the content of the last user message, or of the last message if there is none."""
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
) -> Prompt:
    """Return the tokens of a chat (with its template) or a raw prompt, with passages, at most `budget_tokens`.

    Passages are inserted before the last question or a raw prompt. They use the budget that the request leaves, at most
    `passage_tokens`: best first, the last one truncated, the rest dropped.
    `bare` are the tokens without passages, if the caller has them: long text is not tokenized twice. Raises
    `ContextLengthExceeded` if the request alone exceeds the budget.
    """
    bare = _render(tokenizer, messages, prompt, "") if bare is None else list(bare)
    if len(bare) > budget_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(bare)} tokens; the model's context has room for {budget_tokens}",
            "messages" if messages else "prompt",
        )
    room = budget_tokens - len(bare) - _FRAME_TOKENS
    if passages and (passage_tokens is None or room < passage_tokens):  # the budget is the limit: count exactly
        room = budget_tokens - len(_render(tokenizer, messages, prompt, passages_block([])))
    if passage_tokens is not None:
        room = min(room, passage_tokens)
    while True:
        texts, used = _fit(tokenizer, passages, room)
        if not used:
            return Prompt(bare)
        tokens = _render(tokenizer, messages, prompt, passages_block(texts))
        excess = len(tokens) - budget_tokens
        if excess <= 0:
            return Prompt(tokens, used, tuple(texts))
        room -= excess  # tokens can split differently where texts meet: reduce the room by the excess


def passages_chunk(tokenizer: "Tokenizer", passages: Sequence[Passage], budget_tokens: int) -> Prompt:
    """Return at most `budget_tokens` tokens with a probe's passages, for insertion into an answer.

    Insert them before the latest sampled token, which the model has not computed yet; the answer continues from that
    token. If no passage fits, there are no tokens.
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
    """Return the texts of the first passages that fit into `room` tokens, the last truncated, and the passages."""
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
        if room >= _MIN_PASSAGE_TOKENS:
            texts.append(tokenizer.decode(ids[: room - 1]).rstrip("\ufffd \n"))  # one token for the line break
            used.append(passage)
        break
    return texts, tuple(used)


def passage_text(title: str, text: str) -> str:
    """Return a passage in the form that is given to the model."""
    title, text = title.strip(), text.strip()
    return f"[{title}]\n{text}" if title else text


def passages_block(texts: Sequence[str]) -> str:
    """Return the block of instruction and passages that is inserted into a prompt."""
    return "\n\n".join([_INSTRUCTION, *texts])


def question_with_block(block: str, question: str) -> str:
    """Return the last question with the block before it."""
    return f"{block}\n\n{question}"


def _render(tokenizer: "Tokenizer", messages: Sequence[Message], prompt: str | Sequence[int], block: str) -> list[int]:
    """Return the request's tokens, with `block` inserted unless it is empty."""
    if messages:
        return tokenizer.chat(_with_block(messages, block) if block else messages)
    before = f"{block}\n\n" if block else ""
    if isinstance(prompt, str):
        return tokenizer.prompt(prompt, before)
    return (tokenizer.prompt("", before) if before else []) + list(prompt)


def last_question_index(roles: Sequence[str]) -> int:
    """Return the index of the last user message, else of the last message; -1 without messages."""
    return max((index for index, role in enumerate(roles) if role == "user"), default=len(roles) - 1)


def _with_block(messages: Sequence[Message], block: str) -> list[Message]:
    last = last_question_index([message.role for message in messages])
    question = Message(messages[last].role, question_with_block(block, messages[last].content))
    return [*messages[:last], question, *messages[last + 1 :]]


# ---- answers: incremental detokenization and stop strings

_INCOMPLETE = "\ufffd"  # the decoding of bytes that are not a complete character


class StopStrings:
    """Searches streamed text for stop strings, and holds back text that may be the start of one."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.stopped = False

    def push(self, fresh: str) -> str:
        """Return text up to a stop string or to the possible start of one; nothing after a stop string."""
        if self.stopped:
            return ""
        text = self._held + fresh
        matches = [(begin + len(stop), begin) for stop in self._stop if (begin := text.find(stop)) >= 0]
        if matches:
            # The stop string that was complete first wins, independent of how many tokens are pushed at a time.
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the held-back text at the end of the stream."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """Incremental text of one answer. The pieces concatenate to the decoding of all tokens, cut at a stop string.

    Incomplete characters and possible starts of a stop string are held back.
    """

    def __init__(self, tokenizer: "Tokenizer", stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop)
        self._ids: list[int] = []  # window: tokens since the last complete character
        self._context = 0  # leading tokens of the window, for context: decoders may treat a first token differently
        self._emitted = 0  # characters of the window's text that were returned

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; nothing after a stop string."""
        if self.stopped or not token_ids:
            return ""
        self._ids += token_ids
        text = self._tokenizer.decode(self._ids)
        whole = len(text) - text.endswith(_INCOMPLETE)
        fresh = text[self._emitted : whole]
        self._emitted = max(self._emitted, whole)
        if whole == len(text):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._emitted = len(self._tokenizer.decode(self._ids))
        return self._stops.push(fresh)

    def flush(self) -> str:
        """Return the held-back text at the end of the answer."""
        if self.stopped:
            return ""
        rest = self._tokenizer.decode(self._ids)[self._emitted :]
        self._ids, self._context, self._emitted = [], 0, 0
        return self._stops.push(rest) + self._stops.flush()


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
