"""KV hand-over between separate prefill and decode servers.

The protocol is that of vLLM's own proxies. The prefill server gets the request itself, limited to one token that is
discarded, with `do_remote_decode` in `kv_transfer_params`; the params of its response go to the decode server with the
request and locate the KV there. The KV connector transfers the blocks and expires those that are never read. Without
KV, or without a prefill server, the decode server computes the prompt: a failed hand-over costs time, not a request.

A prompt that the decode server has almost entirely cached is not handed over: see `HandoverCosts`.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from runtime.engines.openai.assembly import BYTES_PER_TOKEN
from runtime.engines.openai.load_balancer import Backend, LoadBalancer
from runtime.engines.openai.signals import EngineSignals
from runtime.errors import EngineFailed, EngineUnreachable, Overloaded
from runtime.serving.http.passthrough import first_set

log = logging.getLogger(__name__)

Json = dict[str, Any]

_MAX_ATTEMPTS = 2  # prefill servers tried for a prompt
_WINDOW = 64
_MIN_SAMPLES = 8
# Removed from the prefill request: fields that conflict with one token, or only add cost there.
_DECODE_ONLY = ("stream_options", "min_tokens", "max_completion_tokens", "return_token_ids")
_PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# With these there are several answers, or the prompt's own tokens are returned, which requires computing all of them.
_NOT_HANDED_OVER = ("n", "best_of", "use_beam_search", "echo", "prompt_logprobs")


class HandoverCosts:
    """Cost model: how many uncached prompt tokens a decode server computes itself, in the time that a hand-over takes.

    Both times are minima over the last 64 hand-overs: prefill time per token that prefill did not have cached, and time
    from the decode request to its first token. Minima, because queueing is a property of neither. Until 8 are measured
    all prompts are handed over.
    """

    def __init__(self, tokens: int | Literal["auto"] = "auto") -> None:
        self._given = tokens
        self._measured: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # ns per token, ns per hand-over

    @property
    def tokens(self) -> int:
        """The threshold: prompts with fewer uncached tokens are computed by the decode server."""
        if self._given != "auto":
            return self._given
        if len(self._measured) < _MIN_SAMPLES:
            return 0
        token, handover = (min(values) for values in zip(*self._measured, strict=True))
        return int(handover / max(token, 1.0))

    @property
    def token_ns(self) -> float:
        """Prefill's time per token; 0 until a hand-over was measured."""
        return min((token for token, _ in self._measured), default=0.0)

    def record(self, tokens: int, prefill_ns: int, handover_ns: int) -> None:
        """Record a hand-over: `tokens` computed in `prefill_ns`, decode's first token `handover_ns` later."""
        if tokens > 0:
            self._measured.append((prefill_ns / tokens, float(handover_ns)))


class Handovers:
    """Runs prompts on prefill servers. `clock` returns monotonic ns."""

    def __init__(
        self, balancer: LoadBalancer, costs: HandoverCosts, signals: EngineSignals, clock: Callable[[], int]
    ) -> None:
        self._balancer, self._costs, self._signals, self._clock = balancer, costs, signals, clock

    async def hand_over(
        self, backend: Backend, body: Json, path: str, prefix: Sequence[int], overlap: float, request_id: str
    ) -> "Handover | None":
        """Compute a prompt for `backend`, which has the share `overlap` of it cached, on a prefill server.

        None if `backend` is to compute it. Raises errors that the request itself causes.
        """
        wanted = self._should_hand_over(backend, body, overlap)
        if wanted and (computed := await self._compute(body, path, prefix, request_id)) is not None:
            return computed
        if backend.server.stage == "decode":
            self._signals.count_prompt("decode", int(prompt_tokens(body) * (1.0 - overlap)))
        return None

    def record(self, handover: "Handover", handover_ns: int) -> None:
        """Record a hand-over whose first token came `handover_ns` after the decode request."""
        self._costs.record(handover.tokens, handover.prefill_ns, handover_ns)
        # By the least time per token lately: a queue at prefill is no work.
        seconds = handover.tokens * self._costs.token_ns / 1e9
        self._signals.count_prompt("prefill", handover.tokens, seconds)

    def _should_hand_over(self, backend: Backend, body: Json, overlap: float) -> bool:
        if backend.server.stage != "decode":
            return False
        if first_set(body, _NOT_HANDED_OVER):
            return False
        missing = prompt_tokens(body) * (1.0 - overlap)
        return missing >= max(1, self._costs.tokens)

    async def _compute(self, body: Json, path: str, prefix: Sequence[int], request_id: str) -> "Handover | None":
        """Compute the request's prompt; None if no prefill server can."""
        avoid: list[Backend] = []
        prefill_body = {name: value for name, value in body.items() if name not in _DECODE_ONLY}
        prefill_body |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _PREFILL_PARAMS}
        while len(avoid) < _MAX_ATTEMPTS and (backend := self._balancer.choose_prefill(avoid, prefix)) is not None:
            begin_ns = self._clock()
            self._balancer.remember(backend, prefix)
            try:
                answer = await backend.server.post(path, prefill_body, request_id=request_id)
            except (EngineFailed, EngineUnreachable, Overloaded) as error:
                self._balancer.record_outcome(backend, error)
                log.warning("prefill failed: %s", error.message, extra={"request": request_id})
                avoid.append(backend)
            else:
                self._balancer.record_outcome(backend, None)
                return Handover(answer, self._clock() - begin_ns)
            finally:
                self._balancer.release(backend)
        return None


class Handover:
    """A computed prompt: `params` for the decode request, and the number of `tokens` computed in `prefill_ns`."""

    def __init__(self, answer: Json, prefill_ns: int) -> None:
        self.prefill_ns, self.params = prefill_ns, _object(answer, "kv_transfer_params")
        usage = _object(answer, "usage")
        self.tokens = _number(usage, "prompt_tokens") - _number(
            _object(usage, "prompt_tokens_details"), "cached_tokens"
        )

    @property
    def fields(self) -> Json:
        """Fields to add to the decode request."""
        return {"kv_transfer_params": self.params} if self.params else {}


def _object(holder: Json, name: str) -> Json:
    """Return the object at `name`; empty if there is none."""
    found = holder.get(name)
    return found if isinstance(found, dict) else {}


def _number(holder: Json, name: str) -> int:
    found = holder.get(name)
    return found if type(found) is int and 0 <= found < 1 << 31 else 0


def prompt_tokens(body: Json) -> int:
    """Return the number of tokens of a request's prompt, estimated for text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    return len(prompt_text(body).encode(errors="replace")) // BYTES_PER_TOKEN


def prompt_text(body: Json) -> str:
    """Return a request's prompt as one text, for comparing prefixes."""
    if "messages" not in body:
        return str(body.get("prompt", ""))
    return "".join(f"{turn.get('role')}\0{_text(turn.get('content'))}\0" for turn in body["messages"])


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\0".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content or "")
