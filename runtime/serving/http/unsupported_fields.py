"""OpenAI's and vLLM's body fields that Trinity does not have: refused where they ask for something, else let pass.

`docs/http.md` shows the same two tables; a test compares them with `unsupported_table` and `ignored_table`.
"""

import json
from dataclasses import dataclass

from runtime.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that would change the answer, or what is kept of it. `neutral` are the values with which it does not."""

    reason: str
    neutral: tuple[object, ...] = ()


_SINGLE = "a request has one answer"
_SAMPLING = "sampling has temperature and top_p alone"
_TOOLS = "there are no tools"
_LOGPROBS = "probabilities are not returned"
_TEXT = "answers are text"
_TEMPLATE = "the model's own chat template is applied, once, to all turns"
_TOKENS = "special tokens are left out of the text, and spaces are the tokenizer's"

UNSUPPORTED: dict[str, UnsupportedField] = {
    "n": UnsupportedField(_SINGLE, (1,)),
    "best_of": UnsupportedField(_SINGLE, (1,)),
    "use_beam_search": UnsupportedField(_SINGLE, (False,)),
    "length_penalty": UnsupportedField("there is no beam search", (1,)),
    "echo": UnsupportedField("the prompt is not given back", (False,)),
    "suffix": UnsupportedField("nothing is inserted before a text", ("",)),
    "logprobs": UnsupportedField(_LOGPROBS, (False,)),
    "top_logprobs": UnsupportedField(_LOGPROBS, (0,)),
    "prompt_logprobs": UnsupportedField(_LOGPROBS),
    "logit_bias": UnsupportedField(_SAMPLING, ({},)),
    "presence_penalty": UnsupportedField(_SAMPLING, (0,)),
    "frequency_penalty": UnsupportedField(_SAMPLING, (0,)),
    "repetition_penalty": UnsupportedField(_SAMPLING, (1,)),
    "top_k": UnsupportedField(_SAMPLING, (0, -1)),
    "min_p": UnsupportedField(_SAMPLING, (0,)),
    "min_tokens": UnsupportedField("an answer may end at its first token; ignore_eos has it go on to max_tokens", (0,)),
    "stop_token_ids": UnsupportedField("answers stop at strings", ([],)),
    "include_stop_str_in_output": UnsupportedField("an answer ends before its stop string", (False,)),
    "bad_words": UnsupportedField(_SAMPLING, ([],)),
    "allowed_token_ids": UnsupportedField(_SAMPLING, ([],)),
    "tools": UnsupportedField(_TOOLS, ([],)),
    "functions": UnsupportedField(_TOOLS, ([],)),
    "tool_choice": UnsupportedField(_TOOLS, ("none",)),
    "function_call": UnsupportedField(_TOOLS, ("none",)),
    "parallel_tool_calls": UnsupportedField(_TOOLS, (False,)),
    "response_format": UnsupportedField("answers are not constrained", ({"type": "text"},)),
    "structured_outputs": UnsupportedField("answers are not constrained"),
    "modalities": UnsupportedField(_TEXT, (["text"],)),
    "audio": UnsupportedField(_TEXT),
    "reasoning_effort": UnsupportedField("the model's effort is not set", ("none",)),
    "verbosity": UnsupportedField("the answer's length is max_tokens' alone", ("medium",)),
    "web_search_options": UnsupportedField("the web is not searched; retrieval searches the node's collections"),
    "documents": UnsupportedField("passages come from a collection, by retrieval", ([],)),
    "prediction": UnsupportedField("no predicted text speeds up the answer"),
    "moderation": UnsupportedField("nothing is moderated"),
    "store": UnsupportedField("no answer is kept to be asked for later", (False,)),
    "service_tier": UnsupportedField("there is one tier", ("auto", "default")),
    "priority": UnsupportedField("requests go in order of their deadlines", (0,)),
    "prompt_cache_retention": UnsupportedField("cached prefixes last while there is room", ("in_memory",)),
    "prompt_cache_options": UnsupportedField("prefixes are cached by themselves", ({}, {"mode": "implicit"})),
    "cache_salt": UnsupportedField("all who hold a key share the prefix cache"),
    "truncate_prompt_tokens": UnsupportedField("prompts are not cut"),
    "chat_template": UnsupportedField(_TEMPLATE),
    "chat_template_kwargs": UnsupportedField(_TEMPLATE, ({},)),
    "add_generation_prompt": UnsupportedField(_TEMPLATE, (True,)),
    "continue_final_message": UnsupportedField(_TEMPLATE, (False,)),
    "skip_special_tokens": UnsupportedField(_TOKENS, (True,)),
    "spaces_between_special_tokens": UnsupportedField(_TOKENS, (True,)),
    "no_stop_trim": UnsupportedField("an answer ends before its stop string", (False,)),
    "return_hidden_states": UnsupportedField("the model's states are not returned", (False,)),
    "request_id": UnsupportedField("the header x-request-id names a request"),
    "stream_options.include_obfuscation": UnsupportedField("events are not padded", (False,)),
}

IGNORED: dict[str, str] = {
    "user": "who asks is the API key's matter",
    "safety_identifier": "the same",
    "metadata": "for answers that are stored, and none is",
    "separate_reasoning": "answers have no part that is reasoning",
    "stream_reasoning": "the same",
    "include_reasoning": "the same",
    "prompt_cache_key": "a prompt goes to the worker that has most of its prefix anyway",
    "messages[].name": "chat templates know roles alone",
    "messages[].content[].cache_control": "prefixes are cached by themselves",
    "messages[].content[].prompt_cache_breakpoint": "the same",
}


def is_set(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether a value is none of the neutral ones. A boolean is not a number here: `logprobs: 0` asks for something,
    `logprobs: false` does not."""
    return not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def accept(name: str, value: object) -> bool:
    """Whether this is one of the fields above, at most a hint. Raises InvalidRequest for what there is not."""
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


def unsupported_table() -> str:
    """Markdown: field, the values that pass, why others are refused."""
    rows = ["| field | passes | anything else is refused: |", "|---|---|---|"]
    for name, field in UNSUPPORTED.items():
        passes = ", ".join(f"`{json.dumps(neutral)}`" for neutral in field.neutral) or "–"
        rows.append(f"| `{name}` | {passes} | {field.reason} |")
    return "\n".join(rows) + "\n"


def ignored_table() -> str:
    """Markdown: field, why it changes nothing."""
    return "\n".join(["| field | |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in IGNORED.items())]) + "\n"
