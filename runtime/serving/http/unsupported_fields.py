"""Body fields of OpenAI and vLLM that Trinity does not support: refused unless they have a neutral value.

`docs/http.md` contains the same two tables; a test compares them with `unsupported_table` and `ignored_table`.
"""

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that would change the answer or its storage. `neutral`: the values with which it has no effect."""

    reason: str
    neutral: tuple[object, ...] = ()


_SINGLE = "a request has one choice"
_SAMPLING = "sampling supports temperature and top_p only"
_TOOLS = "tools are not supported"
_LOGPROBS = "log probabilities are not returned"
_TEXT = "answers are text"
_TEMPLATE = "the model's own chat template is applied to all turns"
_TOKENS = "the text excludes special tokens, and the tokenizer determines spaces"

UNSUPPORTED: dict[str, UnsupportedField] = {
    "n": UnsupportedField(_SINGLE, (1,)),
    "best_of": UnsupportedField(_SINGLE, (1,)),
    "use_beam_search": UnsupportedField(_SINGLE, (False,)),
    "length_penalty": UnsupportedField("beam search is not supported", (1,)),
    "echo": UnsupportedField("the prompt is not returned", (False,)),
    "suffix": UnsupportedField("insertion before a suffix is not supported", ("",)),
    "logprobs": UnsupportedField(_LOGPROBS, (False,)),
    "top_logprobs": UnsupportedField(_LOGPROBS, (0,)),
    "prompt_logprobs": UnsupportedField(_LOGPROBS),
    "logit_bias": UnsupportedField(_SAMPLING, ({},)),
    "presence_penalty": UnsupportedField(_SAMPLING, (0,)),
    "frequency_penalty": UnsupportedField(_SAMPLING, (0,)),
    "repetition_penalty": UnsupportedField(_SAMPLING, (1,)),
    "top_k": UnsupportedField(_SAMPLING, (0, -1)),
    "min_p": UnsupportedField(_SAMPLING, (0,)),
    "min_tokens": UnsupportedField("an answer may end at any token; with ignore_eos it continues to max_tokens", (0,)),
    "stop_token_ids": UnsupportedField("only stop strings are supported", ([],)),
    "include_stop_str_in_output": UnsupportedField("an answer ends before its stop string", (False,)),
    "bad_words": UnsupportedField(_SAMPLING, ([],)),
    "allowed_token_ids": UnsupportedField(_SAMPLING, ([],)),
    "tools": UnsupportedField(_TOOLS, ([],)),
    "functions": UnsupportedField(_TOOLS, ([],)),
    "tool_choice": UnsupportedField(_TOOLS, ("none",)),
    "function_call": UnsupportedField(_TOOLS, ("none",)),
    "parallel_tool_calls": UnsupportedField(_TOOLS, (False,)),
    "response_format": UnsupportedField("structured output is not supported", ({"type": "text"},)),
    "structured_outputs": UnsupportedField("structured output is not supported"),
    "modalities": UnsupportedField(_TEXT, (["text"],)),
    "audio": UnsupportedField(_TEXT),
    "reasoning_effort": UnsupportedField("reasoning effort cannot be set", ("none",)),
    "verbosity": UnsupportedField("only max_tokens limits the answer's length", ("medium",)),
    "web_search_options": UnsupportedField("web search is not supported; retrieval searches the node's collections"),
    "documents": UnsupportedField("use retrieval to search a collection", ([],)),
    "prediction": UnsupportedField("predicted outputs are not supported"),
    "moderation": UnsupportedField("moderation is not supported"),
    "store": UnsupportedField("answers are not stored for later requests", (False,)),
    "service_tier": UnsupportedField("there is only one tier", ("auto", "default")),
    "prompt_cache_retention": UnsupportedField("cached prefixes are evicted by LRU", ("in_memory",)),
    "prompt_cache_options": UnsupportedField("prefix caching is automatic", ({}, {"mode": "implicit"})),
    "cache_salt": UnsupportedField("the API key determines the sharing of the prefix cache"),
    "truncate_prompt_tokens": UnsupportedField("prompts are not truncated"),
    "chat_template": UnsupportedField(_TEMPLATE),
    "chat_template_kwargs": UnsupportedField(_TEMPLATE, ({},)),
    "add_generation_prompt": UnsupportedField(_TEMPLATE, (True,)),
    "continue_final_message": UnsupportedField(_TEMPLATE, (False,)),
    "skip_special_tokens": UnsupportedField(_TOKENS, (True,)),
    "spaces_between_special_tokens": UnsupportedField(_TOKENS, (True,)),
    "no_stop_trim": UnsupportedField("an answer ends before its stop string", (False,)),
    "return_hidden_states": UnsupportedField("hidden states are not returned", (False,)),
    "request_id": UnsupportedField("use the header x-request-id"),
    "stream_options.include_obfuscation": UnsupportedField("events are not padded", (False,)),
}

IGNORED: dict[str, str] = {
    "user": "clients are identified by their API keys",
    "safety_identifier": "clients are identified by their API keys",
    "metadata": "answers are not stored",
    "separate_reasoning": "answers have no separate reasoning",
    "stream_reasoning": "answers have no separate reasoning",
    "include_reasoning": "answers have no separate reasoning",
    "prompt_cache_key": "routing is prefix-aware anyway",
    "messages[].name": "chat templates use only roles",
    "messages[].content[].cache_control": "prefix caching is automatic",
    "messages[].content[].prompt_cache_breakpoint": "prefix caching is automatic",
}


def is_set(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value differs from all neutral ones. Booleans are not numbers: `logprobs: 0` is a request,
    `logprobs: false` is not."""
    return not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def accept(name: str, value: object) -> bool:
    """Return whether the field is known and has no effect. Raises InvalidRequest if it is unsupported."""
    if name in IGNORED:
        return True
    refused = UNSUPPORTED.get(name)
    if refused is None:
        return False
    if is_set(value, refused.neutral):
        allowed = " or ".join(json.dumps(neutral) for neutral in refused.neutral)
        raise InvalidRequest(
            f"{name} is not supported" + (f" other than {allowed}" if allowed else "") + f": {refused.reason}", name
        )
    return True


def without_unsupported(
    sent: Mapping[str, Any],
    known: Container[str],
    neutral: Mapping[str, tuple[object, ...]],
    ignored: Container[str],
) -> dict[str, Any]:
    """Return the `known` fields of a body that are not null. `neutral`: unsupported ones, and the values with which
    they have no effect. Raises InvalidRequest for those with another value, and for fields in none of the three."""
    found = {}
    for name, value in sent.items():
        if value is None or name in ignored:
            continue
        if name in known:
            found[name] = value
        elif name not in neutral:
            raise InvalidRequest(f"unknown field {name[:64]!r}", name[:64])
        elif is_set(value, neutral[name]):
            raise InvalidRequest(f"{name} is not supported", name)
    return found


def unsupported_table() -> str:
    """Return Markdown: field, accepted values, reason for refusing others."""
    rows = ["| field | accepted | other values are refused: |", "|---|---|---|"]
    for name, field in UNSUPPORTED.items():
        passes = ", ".join(f"`{json.dumps(neutral)}`" for neutral in field.neutral) or "–"
        rows.append(f"| `{name}` | {passes} | {field.reason} |")
    return "\n".join(rows) + "\n"


def ignored_table() -> str:
    """Return Markdown: field, why it has no effect."""
    return "\n".join(["| field | |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in IGNORED.items())]) + "\n"
