"""Bodies for an engine that takes OpenAI's requests itself: Trinity reads what it acts upon, the rest goes on as is.

So the engine's own fields (tools, JSON schemas, logprobs …) work as far as the engine has them, and it is the engine
that refuses what it does not have. What Trinity cannot combine with them is refused before (`single_request_field`).
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.serving.http import unsupported_fields
from runtime.serving.http.api_types import ChatLimits, CompletionBody, GenerateBody, parse_object, validate
from runtime.serving.messages import Message

Passthrough = TypeVar("Passthrough", bound=GenerateBody)

TRINITY_FIELDS = ("retrieval", "answer_cache")
"""What only Trinity knows: no engine is sent it."""

# An answer with probes is written in several requests. That changes what these mean, or cannot be told to a second one.
_SINGLE_REQUEST = (
    *("n", "best_of", "echo", "suffix", "logprobs", "top_logprobs", "prompt_logprobs", "presence_penalty"),
    *("frequency_penalty", "tools", "functions", "tool_choice", "function_call", "response_format"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "use_beam_search"),
    *("continue_final_message", "add_generation_prompt"),
)
_NEUTRAL = {name: field.neutral for name, field in unsupported_fields.UNSUPPORTED.items()}
_NEUTRAL |= dict.fromkeys(("tool_choice", "function_call"), ("none", "auto"))
# What an answer from the cache may have been asked with: with any other field it might have been another answer.
_CACHEABLE = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "seed", "stop", "ignore_eos", "retrieval", "answer_cache", "user", "metadata"),
    }
)


class PassthroughChat(ChatLimits):
    """POST /v1/chat/completions: turns may have parts, tool calls and whatever else the engine reads."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    n: int = Field(1, ge=1, le=128)

    def to_messages(self) -> tuple[Message, ...]:
        """Their text: what is searched for, and counted."""
        return tuple(Message(str(turn.get("role", "")), text_of(turn.get("content"))) for turn in self.messages)


class PassthroughCompletion(CompletionBody):
    """POST /v1/completions."""

    n: int = Field(1, ge=1, le=128)


def parse_passthrough(kind: type[Passthrough], body: bytes) -> tuple[Passthrough, dict[str, Any]]:
    """The body as Trinity reads it, and as it was sent, without what is null or Trinity's alone.

    Raises InvalidRequest that names the parameter, and for a field that is all but one of Trinity's.
    """
    sent = {name: value for name, value in parse_object(body).items() if value is not None}
    for name in sent:
        near = difflib.get_close_matches(name, TRINITY_FIELDS, n=1, cutoff=0.8)
        if near and name not in TRINITY_FIELDS:
            raise InvalidRequest(f"unknown field {name[:64]!r}; did you mean {near[0]!r}?", name[:64])
    read = validate(kind, {name: value for name, value in sent.items() if name in kind.model_fields})
    return read, {name: value for name, value in sent.items() if name not in TRINITY_FIELDS}


def single_request_field(sent: Mapping[str, Any]) -> str:
    """The field for which an answer cannot be written in several requests; "" if there is none."""
    return first_set(sent, _SINGLE_REQUEST)


def first_set(sent: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first of some fields that has a value with which it changes the answer; "" if none has."""
    there = (name for name in names if sent.get(name) is not None)
    return next((name for name in there if unsupported_fields.is_set(sent[name], _NEUTRAL.get(name, ()))), "")


def is_cacheable(sent: dict[str, Any]) -> bool:
    """Whether an answer may come from the cache of answers, or go there."""
    return _CACHEABLE.issuperset(sent)


def text_of(content: object) -> str:
    """The text of a turn's content: a string, or parts of which some are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str))
