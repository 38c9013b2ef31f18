"""How an answer goes on in another request: after a probe, or when its server was lost.

By token ids nothing is lost: prompt, answer so far and what probes brought are one sequence, which the next request has
for its prompt. By a chat whose last turn is to be continued, or by a rendered prompt, the sequence is told as text, and
the server's tokens where texts meet may be others than those that were sampled.
"""

from dataclasses import dataclass, field
from typing import Any

from runtime.engines.openai.abilities import GOES_ON, Abilities, Way
from runtime.errors import InvalidRequest

Json = dict[str, Any]

# Of a chat that goes on as a completion: what both endpoints have, and means the same there.
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
class Script:
    """What the model has before it: the prompt, and behind it what was told and what probes brought, in order.

    `prompt_ids` and `rendered` (a chat as text) are known once the server has told them.
    """

    prompt_ids: list[int] | None = None
    rendered: str | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""

    def add(self, text: str, ids: list[int]) -> None:
        """What comes next."""
        self.text += text
        self.ids += ids


def way_of(abilities: Abilities, sent: Json) -> Way:
    """How this request's answer could go on in another; "" if it could not."""
    if "messages" in sent:
        return abilities.chat_sequel
    if abilities.by_tokens:
        return "tokens"
    return "text" if isinstance(sent.get("prompt"), str) else ""


def sequel(way: Way, sent: Json, script: Script) -> tuple[str, Json]:
    """Path and body of the request that goes on; `script` has something in it."""
    chat = "messages" in sent
    if way == "chat":
        turns = [*sent["messages"], {"role": "assistant", "content": script.text}]
        return "/chat/completions", sent | {"messages": turns} | GOES_ON
    base = {name: sent[name] for name in _CARRIED if name in sent} if chat else sent
    if way == "tokens":
        return "/completions", base | {"prompt": [*(script.prompt_ids or ()), *script.ids]}
    before = script.rendered if chat else sent["prompt"]
    return "/completions", base | {"prompt": f"{before}{script.text}"}


def budget(body: Json, context: int) -> int | None:
    """Tokens that each choice of a request can have at most; None: nobody says. `context` 0: not known."""
    if body.get("echo"):
        return None  # the prompt comes back too
    limit: int | None = body.get("max_tokens", body.get("max_completion_tokens"))
    return limit or context or None


def why_not(abilities: Abilities, sent: Json, *, probes: bool) -> InvalidRequest | None:
    """Why a server cannot take a request; None if it can."""
    chat = "messages" in sent
    if not (abilities.chat if chat else abilities.completions):
        return InvalidRequest(
            f"the engine has no {'chats' if chat else 'completions'}", "messages" if chat else "prompt"
        )
    if probes and not way_of(abilities, sent):
        return InvalidRequest(
            "retrieval.every_tokens: the engine cannot go on with an answer in a second request; leave it out",
            "retrieval.every_tokens",
        )
    if sent.get("return_token_ids") and not abilities.token_ids:
        return InvalidRequest("return_token_ids: the engine does not tell token ids; leave it out", "return_token_ids")
    if (sent.get("stream_options") or {}).get("include_usage") and not abilities.usage:
        return InvalidRequest("stream_options.include_usage: the engine drops it; leave it out", "stream_options")
    return None
