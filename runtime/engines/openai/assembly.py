"""Prompt assembly for servers: passages before a chat's last question, or before a prompt's text.

No tokenizer is available here, so tokens are estimated as four bytes each, as in English text. If the prompt is too
long nevertheless, the client gets the server's error.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.retrieval.passages import Passage
from runtime.serving.model.text import last_question_index, passage_text, passages_block, question_with_block

Json = dict[str, Any]

BYTES_PER_TOKEN = 4
_MIN_CUT_BYTES = 64  # a passage cut to fewer bytes is left out

# Special tokens of chat templates, as text: a document must not be able to end a turn of the chat.
_MARKERS = re.compile(
    r"<[|｜][^<>|｜\n]{1,64}[|｜]>|</?s>|<(?:bos|eos|pad|unk)>|</?(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
    r"|\[/?(?:AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT)\]"
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Passages that fit, nearest first, and their texts, the last possibly cut."""

    texts: tuple[str, ...] = ()
    used: tuple[Passage, ...] = ()


def plain(text: str) -> str:
    """Return `text` without the special tokens of chat templates."""
    while True:
        cleaned = _MARKERS.sub("", text)
        if cleaned == text:  # removing one marker can bring the halves of another together
            return text
        text = cleaned


def fit(passages: Sequence[Passage], tokens: int) -> Fitted:
    """Return the first (nearest) passages that fit into about `tokens` tokens, the last one cut."""
    room = tokens * BYTES_PER_TOKEN
    texts: list[str] = []
    used: list[Passage] = []
    for passage in passages:
        text = passage_text(plain(passage.title), plain(passage.text))
        data = text.encode(errors="replace")
        if len(data) > room:
            if room >= _MIN_CUT_BYTES:
                texts.append(data[:room].decode(errors="ignore").rstrip())
                used.append(passage)
            break
        texts.append(text)
        used.append(passage)
        room -= len(data)
    return Fitted(tuple(texts), tuple(used))


def room_for_passages(prompt_bytes: int, answer_tokens: int, passage_tokens: int, context_tokens: int) -> int:
    """Return the token budget of passages: `passage_tokens`, or what prompt and answer leave of a known context."""
    if not context_tokens:
        return passage_tokens
    prompt = prompt_bytes // (BYTES_PER_TOKEN - 1)  # overestimates: too low an estimate would fail at the server
    return max(0, min(passage_tokens, context_tokens - prompt - answer_tokens))


def with_passages(body: Json, fitted: Fitted) -> Json:
    """Return the request with passages before its last question or its prompt."""
    if not fitted.used:
        return body
    block = passages_block(fitted.texts)
    if "messages" not in body:
        return body | {"prompt": f"{block}\n\n{body['prompt']}"}
    turns = list(body["messages"])
    last = last_question_index([turn.get("role", "") for turn in turns])
    content = turns[last].get("content")
    merged = (
        [{"type": "text", "text": f"{block}\n\n"}, *content]
        if isinstance(content, list)
        else question_with_block(block, str(content))
    )
    turns[last] = turns[last] | {"content": merged}
    return body | {"messages": turns}


def inserted_text(fitted: Fitted) -> str:
    """Return the text of a probe's passages for insertion into an answer; "" without any."""
    return "\n\n" + "\n\n".join(fitted.texts) + "\n\n" if fitted.used else ""
