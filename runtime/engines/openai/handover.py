"""Prefill and decode on servers of their own: a prompt is computed by one, and its KV handed over to the other.

The order is that of vLLM's own proxies. Prefill is asked the request itself, for one token that nobody uses, with
`kv_transfer_params` of `do_remote_decode`; those of its answer go to decode with the request, and there say where the
KV is. How it gets there is the connector's matter, and so is a lease on what nobody comes for. Without KV, or without
a server for prefill, decode computes the prompt: a hand-over that fails costs time, no request.

A prompt of which the decode server has nearly everything is not handed over: see `Costs`.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from runtime.engines.openai.assembly import BYTES_PER_TOKEN
from runtime.engines.openai.servers import Member, Servers
from runtime.errors import EngineFailed, EngineUnreachable, Overloaded
from runtime.serving.http.passthrough import first_set

log = logging.getLogger(__name__)

Json = dict[str, Any]

_TRIES = 2  # prefill servers that are asked
_MEASURED = 64
_ENOUGH = 8
# Of a request for one token: what it may not have, and what only costs there.
_DECODES = ("stream_options", "min_tokens", "max_completion_tokens", "return_token_ids")
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# With these there is more than one answer, or the prompt's own tokens are told, which needs all of them computed.
_AT_ONCE = ("n", "best_of", "use_beam_search", "echo", "prompt_logprobs")


class Costs:
    """How many tokens a decode server may have to compute itself: as many as it does in the time of a hand-over.

    Both are measured. A token takes what it took in the fastest of the last 64 prompts that were handed over, of those
    tokens that prefill did not have; a hand-over what decode took to its first token, in the fastest of them. The
    fastest, because waiting for others is no property of either. Until 8 were measured all prompts are handed over.
    """

    def __init__(self, tokens: int | Literal["auto"] = "auto") -> None:
        self._given = tokens
        self._measured: deque[tuple[float, float]] = deque(maxlen=_MEASURED)  # ns a token, ns of the hand-over

    @property
    def tokens(self) -> int:
        """The limit: fewer are computed where the answer is written."""
        if self._given != "auto":
            return self._given
        if len(self._measured) < _ENOUGH:
            return 0
        token, handover = (min(values) for values in zip(*self._measured, strict=True))
        return int(handover / max(token, 1.0))

    def noted(self, tokens: int, prefill_ns: int, handover_ns: int) -> None:
        """A prompt was handed over: `tokens` of it were computed in `prefill_ns`, `handover_ns` later decode told its
        first token."""
        if tokens > 0:
            self._measured.append((prefill_ns / tokens, float(handover_ns)))


class Handovers:
    """Has prompts computed. `clock` gives monotonic ns."""

    def __init__(self, servers: Servers, costs: Costs, clock: Callable[[], int]) -> None:
        self._servers, self.costs, self._clock = servers, costs, clock

    def wanted(self, member: Member, body: Json, overlap: float) -> bool:
        """Whether this request's prompt is to be computed for `member`, which will write its answer and has the share
        `overlap` of it."""
        if member.server.stage != "decode":
            return False
        if first_set(body, _AT_ONCE):
            return False
        missing = prompt_tokens(body) * (1.0 - overlap)
        return missing >= max(1, self.costs.tokens)

    async def computed(self, body: Json, path: str, prefix: Sequence[int], request_id: str) -> "Handover | None":
        """The request's prompt, computed; None if no server does it. Raises what is wrong with the request."""
        avoid: list[Member] = []
        asked = {name: value for name, value in body.items() if name not in _DECODES}
        asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASKED}
        while len(avoid) < _TRIES and (member := self._servers.choose_prefill(avoid, prefix)) is not None:
            begin_ns = self._clock()
            self._servers.remember(member, prefix)
            try:
                answer = await member.server.post(path, asked, request_id=request_id)
            except (EngineFailed, EngineUnreachable, Overloaded) as error:
                self._servers.noted(member, error)
                log.warning("a prompt is computed elsewhere: %s", error.message, extra={"request": request_id})
                avoid.append(member)
            else:
                self._servers.noted(member, None)
                return Handover(answer, self._clock() - begin_ns)
            finally:
                self._servers.leave(member)
        return None

    def taken(self, handover: "Handover", decode_ns: int) -> None:
        """Decode has told its first token so long after it was asked."""
        self.costs.noted(handover.tokens, handover.prefill_ns, decode_ns)


class Handover:
    """A prompt that was computed: `params` for decode, the tokens that took `prefill_ns`."""

    def __init__(self, answer: Json, prefill_ns: int) -> None:
        self.prefill_ns, self.params = prefill_ns, _object(answer, "kv_transfer_params")
        usage = _object(answer, "usage")
        self.tokens = _number(usage, "prompt_tokens") - _number(
            _object(usage, "prompt_tokens_details"), "cached_tokens"
        )

    @property
    def fields(self) -> Json:
        """What decode's request has beside its own."""
        return {"kv_transfer_params": self.params} if self.params else {}


def _object(holder: Json, name: str) -> Json:
    """What is there by this name; nothing where it is no object, and the answer is written without it."""
    found = holder.get(name)
    return found if isinstance(found, dict) else {}


def _number(holder: Json, name: str) -> int:
    found = holder.get(name)
    return found if type(found) is int and 0 <= found < 1 << 31 else 0


def prompt_tokens(body: Json) -> int:
    """The tokens of a request's prompt; of text about so many."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    return len(prompt_text(body).encode(errors="replace")) // BYTES_PER_TOKEN


def prompt_text(body: Json) -> str:
    """A request's prompt as one text, by which prefixes are compared."""
    if "messages" not in body:
        return str(body.get("prompt", ""))
    return "".join(f"{turn.get('role')}\0{_text(turn.get('content'))}\0" for turn in body["messages"])


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\0".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content or "")
