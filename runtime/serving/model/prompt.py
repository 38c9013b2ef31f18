"""Prompts with passages in them: before the first token, and as a chunk in the middle of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.errors import ContextLengthExceeded
from runtime.retrieval.passages import Passage
from runtime.serving.messages import Message

if TYPE_CHECKING:
    from runtime.serving.model.tokenizer import Tokenizer

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
    asked = [message.content for message in messages if message.role == "user"]
    return asked[-1] if asked else messages[-1].content


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
    """The tokens of a chat (its template rendered) or of a raw prompt, with passages in front, at most `budget_tokens`.

    Passages become part of the system message, or a block before a raw prompt. They get what the request leaves of the
    budget, at most `passage_tokens`: the best come first, the last is cut, the rest is dropped. `bare` are the
    tokens without passages, for who has them already: a long text is not tokenized again.
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
        text = _passage_text(passage)
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


def _passage_text(passage: Passage) -> str:
    title, text = passage.title.strip(), passage.text.strip()
    return f"[{title}]\n{text}" if title else text


def passages_block(texts: Sequence[str]) -> str:
    """The text that brings passages to the model before a prompt, or in a chat's system turn."""
    return "\n\n".join([_INSTRUCTION, *texts])


def _render(tokenizer: "Tokenizer", messages: Sequence[Message], prompt: str | Sequence[int], block: str) -> list[int]:
    """The request's tokens, with `block` in its system message or before it, unless it is empty."""
    if messages:
        return tokenizer.chat(_with_system(messages, block) if block else messages)
    before = f"{block}\n\n" if block else ""
    if isinstance(prompt, str):
        return tokenizer.prompt(prompt, before)
    return (tokenizer.prompt("", before) if before else []) + list(prompt)


def _with_system(messages: Sequence[Message], block: str) -> list[Message]:
    first, *rest = messages
    if first.role == "system":
        return [Message("system", f"{first.content}\n\n{block}"), *rest]
    return [Message("system", block), first, *rest]
