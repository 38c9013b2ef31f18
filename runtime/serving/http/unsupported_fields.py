"""Body fields of OpenAI, vLLM, Cohere and Jina that Trinity does not support: refused unless they change nothing.

`docs/http.md` contains the same table and list; a test compares them with `unsupported_table` and `IGNORED`.
"""

import json
from collections.abc import Container, Mapping
from typing import Any

from runtime.errors import InvalidRequest

_NAMES_BY_VALUES: tuple[tuple[tuple[object, ...], str], ...] = (
    (
        (),
        "access_programs audio cache_salt chat_template context_management conversation image max_tokens_per_doc "
        "moderation prediction prompt prompt_logprobs request_id structured_outputs web_search_options",
    ),
    (
        (False,),
        "background continue_final_message echo include_stop_str_in_output logprobs no_stop_trim parallel_tool_calls "
        "return_embeddings return_hidden_states store use_beam_search",
    ),
    (
        (True,),
        "activation add_generation_prompt skip_special_tokens softmax_normalize spaces_between_special_tokens "
        "use_activation",
    ),
    ((0,), "frequency_penalty min_p min_tokens presence_penalty priority top_logprobs"),
    ((1,), "best_of length_penalty max_chunks_per_doc n repetition_penalty"),
    ((-1,), "truncate_prompt_tokens"),
    ((0, -1), "top_k"),
    (("",), "suffix"),
    (("none",), "function_call reasoning_effort tool_choice"),
    (("auto", "default"), "service_tier"),
    (("disabled", True), "truncation"),
    (("medium",), "verbosity"),
    (([],), "allowed_token_ids bad_words documents functions stop_token_ids tools"),
    (([], ["text"]), "rank_fields"),
    ((["text"],), "modalities"),
    (({},), "chat_template_kwargs logit_bias mm_processor_kwargs reasoning"),
    (({"type": "text"},), "response_format"),
    (({}, {"format": {"type": "text"}}), "text"),
)
NEUTRAL = {name: values for values, names in _NAMES_BY_VALUES for name in names.split()}
"""Unsupported fields, and the values with which they have no effect."""

IGNORED = frozenset((
    *("additional_data", "include_reasoning", "max_tool_calls", "metadata", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "separate_reasoning", "stream_options"),
    *("stream_reasoning", "user"),
))  # fmt: skip
"""Fields that change no answer, whatever their value."""


def is_set(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value differs from all neutral ones. Booleans are not numbers: `logprobs: 0` is a request,
    `logprobs: false` is not."""
    return not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def supported_fields(sent: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return the `known` fields of a body, and those that are known nowhere. Null ones are absent.

    Raises InvalidRequest for an unsupported field with another value than a neutral one.
    """
    supported = {}
    for name, value in sent.items():
        if value is None:
            continue
        if name in known or (name not in NEUTRAL and name not in IGNORED):
            supported[name] = value
        elif name in NEUTRAL and is_set(value, NEUTRAL[name]):
            allowed = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name])
            raise InvalidRequest(f"{name} is not supported" + (f" other than {allowed}" if allowed else ""), name)
    return supported


def unsupported_table() -> str:
    """Return Markdown: accepted values, fields."""
    rows = ["| accepted | fields |", "|---|---|"]
    for values, names in _NAMES_BY_VALUES:
        allowed = ", ".join(f"`{json.dumps(value)}`" for value in values) or "–"
        rows.append(f"| {allowed} | {', '.join(f'`{name}`' for name in names.split())} |")
    return "\n".join(rows) + "\n"
