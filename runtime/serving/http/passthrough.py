"""Bodies for an engine that accepts OpenAI requests itself: Trinity reads the fields it needs and forwards the others.

So the engine's own fields (tools, JSON schemas, logprobs …) work if the engine supports them, and the engine refuses
those it does not. Combinations that Trinity cannot serve are refused before (`single_request_field`).
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.serving.http.api_types import ChatLimits, CompletionBody, GenerateBody
from runtime.serving.http.parsing import parse_object, validate, without_null
from runtime.serving.http.unsupported_fields import NEUTRAL, is_set
from runtime.serving.messages import Message

Passthrough = TypeVar("Passthrough", bound=GenerateBody)

TRINITY_FIELDS = ("retrieval", "answer_cache")
"""Fields of Trinity that are not forwarded."""

# An answer with probes takes several requests to the engine; these fields would change meaning or cannot be continued.
_SINGLE_REQUEST = (
    *("n", "best_of", "echo", "suffix", "logprobs", "top_logprobs", "prompt_logprobs", "presence_penalty"),
    *("frequency_penalty", "tools", "functions", "tool_choice", "function_call", "response_format"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "use_beam_search"),
    *("continue_final_message", "add_generation_prompt"),
)
_NEUTRAL = NEUTRAL | dict.fromkeys(("tool_choice", "function_call"), ("none", "auto"))
# Only bodies without other fields use the answer cache: any other field might change the answer.
_CACHEABLE = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "seed", "stop", "ignore_eos", "retrieval", "answer_cache", "user", "metadata"),
        *("priority", "nvext"),
    }
)


class PassthroughChat(ChatLimits):
    """POST /v1/chat/completions: turns may have parts, tool calls and any other field of the engine."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    n: int = Field(1, ge=1, le=128)

    def to_messages(self) -> tuple[Message, ...]:
        """Return the texts, for searches and size limits."""
        return tuple(Message(str(turn.get("role", "")), text_of(turn.get("content"))) for turn in self.messages)


class PassthroughCompletion(CompletionBody):
    """POST /v1/completions."""

    n: int = Field(1, ge=1, le=128)


def parse_passthrough(model: type[Passthrough], body: bytes) -> tuple[Passthrough, dict[str, Any]]:
    """Return the body as Trinity reads it, and the fields to forward: those sent, except null and Trinity's own.

    Raises InvalidRequest that names the parameter, also for a field that resembles one of Trinity's.
    """
    sent = without_null(parse_object(body))
    for name in sent:
        near = difflib.get_close_matches(name, TRINITY_FIELDS, n=1, cutoff=0.8)
        if near and name not in TRINITY_FIELDS:
            raise InvalidRequest(f"unknown field {name[:64]!r}; did you mean {near[0]!r}?", name[:64])
    read = validate(model, {name: value for name, value in sent.items() if name in model.model_fields})
    return read, {name: value for name, value in sent.items() if name not in TRINITY_FIELDS}


def single_request_field(sent: Mapping[str, Any]) -> str:
    """Return a field set that requires the answer to be generated in a single request; "" if there is none."""
    return first_set(sent, _SINGLE_REQUEST)


def first_set(sent: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the first of the fields that has a value other than a neutral one; "" if none has."""
    present = (name for name in names if sent.get(name) is not None)
    return next((name for name in present if is_set(sent[name], _NEUTRAL.get(name, ()))), "")


def is_cacheable(sent: dict[str, Any]) -> bool:
    """Return whether the answer may be read from or stored in the answer cache."""
    return _CACHEABLE.issuperset(sent)


def text_of(content: object) -> str:
    """Return the text of a turn's content: a string, or parts some of which are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str))
