"""OpenAI's and vLLM's body fields that Trinity does not have: refused where they ask for something, else let pass.

`docs/http.md` shows the same two tables; a test compares them with `refused_table` and `hints_table`.
"""

import json
from dataclasses import dataclass

from runtime.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer, or what is kept of it. `neutral` are the values with which it does not."""

    why: str
    neutral: tuple[object, ...] = ()


_SINGLE = "a request has one answer"
_SAMPLING = "sampling has temperature and top_p alone"
_TOOLS = "there are no tools"
_LOGPROBS = "probabilities are not returned"
_TEXT = "answers are text"
_TEMPLATE = "the model's own chat template is applied, once, to all turns"
_TOKENS = "special tokens are left out of the text, and spaces are the tokenizer's"

REFUSED: dict[str, Refused] = {
    "n": Refused(_SINGLE, (1,)),
    "best_of": Refused(_SINGLE, (1,)),
    "use_beam_search": Refused(_SINGLE, (False,)),
    "length_penalty": Refused("there is no beam search", (1,)),
    "echo": Refused("the prompt is not given back", (False,)),
    "suffix": Refused("nothing is inserted before a text", ("",)),
    "logprobs": Refused(_LOGPROBS, (False,)),
    "top_logprobs": Refused(_LOGPROBS, (0,)),
    "prompt_logprobs": Refused(_LOGPROBS),
    "logit_bias": Refused(_SAMPLING, ({},)),
    "presence_penalty": Refused(_SAMPLING, (0,)),
    "frequency_penalty": Refused(_SAMPLING, (0,)),
    "repetition_penalty": Refused(_SAMPLING, (1,)),
    "top_k": Refused(_SAMPLING, (0, -1)),
    "min_p": Refused(_SAMPLING, (0,)),
    "min_tokens": Refused("an answer may end at its first token; ignore_eos has it go on to max_tokens", (0,)),
    "stop_token_ids": Refused("answers stop at strings", ([],)),
    "include_stop_str_in_output": Refused("an answer ends before its stop string", (False,)),
    "bad_words": Refused(_SAMPLING, ([],)),
    "allowed_token_ids": Refused(_SAMPLING, ([],)),
    "tools": Refused(_TOOLS, ([],)),
    "functions": Refused(_TOOLS, ([],)),
    "tool_choice": Refused(_TOOLS, ("none",)),
    "function_call": Refused(_TOOLS, ("none",)),
    "parallel_tool_calls": Refused(_TOOLS, (False,)),
    "response_format": Refused("answers are not constrained", ({"type": "text"},)),
    "structured_outputs": Refused("answers are not constrained"),
    "modalities": Refused(_TEXT, (["text"],)),
    "audio": Refused(_TEXT),
    "reasoning_effort": Refused("the model's effort is not set", ("none",)),
    "verbosity": Refused("the answer's length is max_tokens' alone", ("medium",)),
    "web_search_options": Refused("the web is not searched; retrieval searches the node's collections"),
    "documents": Refused("passages come from a collection, by retrieval", ([],)),
    "prediction": Refused("no predicted text speeds up the answer"),
    "moderation": Refused("nothing is moderated"),
    "store": Refused("no answer is kept to be asked for later", (False,)),
    "service_tier": Refused("there is one tier", ("auto", "default")),
    "priority": Refused("requests go in order of their deadlines", (0,)),
    "prompt_cache_retention": Refused("cached prefixes last while there is room", ("in_memory",)),
    "prompt_cache_options": Refused("prefixes are cached by themselves", ({}, {"mode": "implicit"})),
    "cache_salt": Refused("all who hold a key share the prefix cache"),
    "truncate_prompt_tokens": Refused("prompts are not cut"),
    "chat_template": Refused(_TEMPLATE),
    "chat_template_kwargs": Refused(_TEMPLATE, ({},)),
    "add_generation_prompt": Refused(_TEMPLATE, (True,)),
    "continue_final_message": Refused(_TEMPLATE, (False,)),
    "skip_special_tokens": Refused(_TOKENS, (True,)),
    "spaces_between_special_tokens": Refused(_TOKENS, (True,)),
    "no_stop_trim": Refused("an answer ends before its stop string", (False,)),
    "return_hidden_states": Refused("the model's states are not returned", (False,)),
    "request_id": Refused("the header x-request-id names a request"),
    "stream_options.include_obfuscation": Refused("events are not padded", (False,)),
}

HINTS: dict[str, str] = {
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


def asks(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether a value is none of the neutral ones. A boolean is not a number here: `logprobs: 0` asks for something,
    `logprobs: false` does not."""
    return not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def check(name: str, value: object) -> bool:
    """Whether this is one of the fields above, at most a hint. Raises InvalidRequest for what there is not."""
    if name in HINTS:
        return True
    refused = REFUSED.get(name)
    if refused is None:
        return False
    if asks(value, refused.neutral):
        allowed = " or ".join(json.dumps(neutral) for neutral in refused.neutral)
        raise InvalidRequest(
            f"{name} is not supported" + (f" other than {allowed}" if allowed else "") + f": {refused.why}", name
        )
    return True


def refused_table() -> str:
    """Markdown: field, the values that pass, why others are refused."""
    rows = ["| field | passes | anything else is refused: |", "|---|---|---|"]
    for name, field in REFUSED.items():
        passes = ", ".join(f"`{json.dumps(neutral)}`" for neutral in field.neutral) or "–"
        rows.append(f"| `{name}` | {passes} | {field.why} |")
    return "\n".join(rows) + "\n"


def hints_table() -> str:
    """Markdown: field, why it changes nothing."""
    return "\n".join(["| field | |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in HINTS.items())]) + "\n"
