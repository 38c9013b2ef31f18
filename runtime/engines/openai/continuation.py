"""Continuation of an answer in another request: after a probe, or after its server failed.

By token ids the continuation is exact: prompt, answer so far and probes' passages form one sequence, which is the next
request's prompt. By a chat whose last turn is continued, or by a rendered prompt, the sequence is sent as text, and the
server may tokenize the seams differently from what was sampled.
"""

from dataclasses import dataclass, field
from typing import Any

from runtime.engines.openai.capabilities import CONTINUE_LAST_TURN, Capabilities, Continuation
from runtime.errors import InvalidRequest

Json = dict[str, Any]

# Parameters that a chat keeps when it continues as a completion: both endpoints have them, with the same meaning.
_CARRIED = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logit_bias",
        "bad_words",
    ),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "skip_special_tokens", "user"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "priority", "cache_salt", "metadata"),
)


@dataclass(slots=True)
class Transcript:
    """The model's input so far: the prompt, then the answer and the probes' passages in order.

    `prompt_ids` and `rendered` (a chat as text) are None until the server has returned them.
    """

    prompt_ids: list[int] | None = None
    rendered: str | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""

    def add(self, text: str, ids: list[int]) -> None:
        """Append text and its tokens."""
        self.text += text
        self.ids += ids


def continuation_method(capabilities: Capabilities, body: Json) -> Continuation:
    """Return how the request's answer continues in another request; "" if it cannot."""
    if "messages" in body:
        return capabilities.chat_continuation
    if capabilities.continues_by_tokens:
        return "tokens"
    return "text" if isinstance(body.get("prompt"), str) else ""


def continuation_request(method: Continuation, body: Json, transcript: Transcript) -> tuple[str, Json]:
    """Return path and body of the request that continues the answer; `transcript` must not be empty."""
    chat = "messages" in body
    if method == "chat":
        turns = [*body["messages"], {"role": "assistant", "content": transcript.text}]
        return "/chat/completions", body | {"messages": turns} | CONTINUE_LAST_TURN
    base = {name: body[name] for name in _CARRIED if name in body} if chat else body
    if method == "tokens":
        return "/completions", base | {"prompt": [*(transcript.prompt_ids or ()), *transcript.ids]}
    before = transcript.rendered if chat else body["prompt"]
    return "/completions", base | {"prompt": f"{before}{transcript.text}"}


def unsupported(capabilities: Capabilities, body: Json, *, probes: bool) -> InvalidRequest | None:
    """Return the error for a request that a server cannot run; None if it can."""
    chat = "messages" in body
    if not (capabilities.chat if chat else capabilities.completions):
        return InvalidRequest(
            f"the engine has no {'chats' if chat else 'completions'}", "messages" if chat else "prompt"
        )
    if probes and not continuation_method(capabilities, body):
        return InvalidRequest(
            "retrieval.every_tokens: the engine cannot continue an answer in a second request; leave it out",
            "retrieval.every_tokens",
        )
    if body.get("return_token_ids") and not capabilities.token_ids:
        return InvalidRequest(
            "return_token_ids: the engine does not return token ids; leave it out", "return_token_ids"
        )
    if (body.get("stream_options") or {}).get("include_usage") and not capabilities.usage:
        return InvalidRequest("stream_options.include_usage: the engine ignores it; leave it out", "stream_options")
    return None
