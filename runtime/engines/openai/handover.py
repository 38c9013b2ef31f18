"""KV hand-over between separate prefill and decode servers: which prompts, on which server, and what failures cost.

`transfer.py` has what the requests contain. Where a decode server can compute a prompt too, prefill is asked first;
without KV, or without a prefill server, decode computes the prompt: a failed hand-over costs time, not a request. A
prompt that such a server has almost entirely cached is not handed over: see `HandoverCosts`. Servers that work in pairs
only get the request together; if prefill's fails, so does decode's, and the request is retried on another pair.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from runtime.engines.openai.assembly import BYTES_PER_TOKEN
from runtime.engines.openai.load_balancer import Backend, LoadBalancer
from runtime.engines.openai.server import PrefillFailed
from runtime.engines.openai.signals import EngineSignals
from runtime.engines.openai.transfer import Transfer
from runtime.errors import EngineFailed, EngineUnreachable, Overloaded
from runtime.serving.frontend.choice import BLOCK_CHARS, BLOCK_TOKENS
from runtime.serving.http.passthrough import first_set

log = logging.getLogger(__name__)

Json = dict[str, Any]

_MAX_ATTEMPTS = 2  # prefill servers tried for a prompt
_WINDOW = 64
_MIN_SAMPLES = 8
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
        self._token_ns: deque[float] = deque(maxlen=_WINDOW)
        self._handover_ns: deque[int] = deque(maxlen=_WINDOW)

    @property
    def tokens(self) -> int:
        """The threshold: prompts with fewer uncached tokens are computed by the decode server."""
        if self._given != "auto":
            return self._given
        if min(len(self._token_ns), len(self._handover_ns)) < _MIN_SAMPLES:
            return 0
        return int(min(self._handover_ns) / max(self.token_ns, 1.0))

    @property
    def token_ns(self) -> float:
        """Prefill's time per token; 0 until one was measured."""
        return min(self._token_ns, default=0.0)

    def record_prefill(self, tokens: int, prefill_ns: int) -> None:
        """Record a prompt of which prefill computed `tokens` tokens."""
        if tokens > 0:
            self._token_ns.append(prefill_ns / tokens)

    def record_handover(self, handover_ns: int) -> None:
        """Record that decode's first token came so long after its request."""
        self._handover_ns.append(handover_ns)


class Handover:
    """A decode request's part of a hand-over: `fields` to add to it."""

    def __init__(self, fields: Json | None = None, on_first: Callable[[], None] | None = None) -> None:
        self.fields, self._on_first = fields or {}, on_first

    def arrived(self) -> None:
        """A chunk of the answer has arrived."""
        if self._on_first is not None:
            self._on_first()
            self._on_first = None


class Handovers:
    """Runs prompts on prefill servers. `clock` returns monotonic ns."""

    def __init__(
        self,
        balancer: LoadBalancer,
        transfer: Transfer,
        costs: HandoverCosts,
        signals: EngineSignals,
        clock: Callable[[], int],
    ) -> None:
        self._balancer, self._transfer, self._costs = balancer, transfer, costs
        self._signals, self._clock = signals, clock

    @contextlib.asynccontextmanager
    async def hand_over(
        self, backend: Backend, body: Json, path: str, prefix: Sequence[int], overlap: float, request_id: str
    ) -> AsyncIterator[Handover]:
        """Have a prompt computed for `backend`, which has the share `overlap` of it cached.

        Entering raises errors that the request itself causes, and leaving raises PrefillFailed if a paired server did.
        """
        if self._transfer.paired and backend.server.stage == "decode":
            async with self._beside(path, body, prefix, request_id) as beside:
                yield beside
            return
        handover = None
        if self._should_hand_over(backend, body, overlap):
            handover = await self._before(path, body, prefix, request_id)
        if handover is None and backend.server.stage == "decode":
            self._signals.count_prompt("decode", int(prompt_tokens(body) * (1.0 - overlap)))
        yield handover or Handover()

    def _should_hand_over(self, backend: Backend, body: Json, overlap: float) -> bool:
        if backend.server.stage != "decode" or first_set(body, _NOT_HANDED_OVER):
            return False
        missing = prompt_tokens(body) * (1.0 - overlap)
        return missing >= max(1, self._costs.tokens)

    async def _before(self, path: str, body: Json, prefix: Sequence[int], request_id: str) -> Handover | None:
        """Have the prompt computed before decode gets the request; None if no prefill server can."""
        avoid: list[Backend] = []
        while len(avoid) < _MAX_ATTEMPTS and (backend := self._balancer.choose_prefill(avoid, prefix)) is not None:
            asked = self._transfer.prefill_body(backend.server, body)
            try:
                answer = await self._compute(backend, path, asked, prefix, request_id)
            except PrefillFailed:
                avoid.append(backend)
            else:
                return Handover(self._transfer.decode_fields(asked, answer), self._measure_handover())
        return None

    def _measure_handover(self) -> Callable[[], None]:
        """Return the callback for decode's first token, after a hand-over that begins now."""
        begin_ns = self._clock()
        return lambda: self._costs.record_handover(self._clock() - begin_ns)

    @contextlib.asynccontextmanager
    async def _beside(self, path: str, body: Json, prefix: Sequence[int], request_id: str) -> AsyncIterator[Handover]:
        """Have the prompt computed while decode has the request, which ends when prefill's fails."""
        if (backend := self._balancer.choose_prefill((), prefix)) is None:
            raise PrefillFailed("no prefill server of the model answers")
        asked = self._transfer.prefill_body(backend.server, body)
        prefill = asyncio.create_task(self._compute(backend, path, asked, prefix, request_id))
        answering = True
        try:
            async with asyncio.timeout(None) as limit:

                def ended(task: asyncio.Task[Json]) -> None:
                    if answering and not task.cancelled() and task.exception() is not None:
                        limit.reschedule(0.0)

                prefill.add_done_callback(ended)
                try:
                    yield Handover(self._transfer.decode_fields(asked, {}))
                finally:
                    answering = False  # removing the callback would be too late for one that is scheduled
        except (TimeoutError, EngineFailed, EngineUnreachable):
            if prefill.done() and (error := prefill.exception()) is not None:
                raise error from None  # the cause, or the error of the request itself
            raise
        finally:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    async def _compute(self, backend: Backend, path: str, asked: Json, prefix: Sequence[int], request_id: str) -> Json:
        """Have a chosen prefill server compute a prompt. Raises PrefillFailed, and errors that the request causes."""
        begin_ns = self._clock()
        self._balancer.remember(backend, prefix)
        try:
            answer = await backend.server.post(path, asked, request_id=request_id)
        except (EngineFailed, EngineUnreachable, Overloaded) as error:
            self._balancer.record_outcome(backend, error)
            log.warning("prefill failed: %s", error.message, extra={"request": request_id})
            raise PrefillFailed(error.message) from error
        finally:
            self._balancer.release(backend)
        self._balancer.record_outcome(backend, None)
        tokens = computed_tokens(answer)
        self._costs.record_prefill(tokens, self._clock() - begin_ns)
        # By the least time per token lately: a queue at prefill is no work.
        self._signals.count_prompt("prefill", tokens, tokens * self._costs.token_ns / 1e9)
        return answer


def computed_tokens(answer: Json) -> int:
    """Return how many of the prompt's tokens a server has computed, by its response: not those that it had cached."""
    usage = _object(answer, "usage")
    return _number(usage, "prompt_tokens") - _number(_object(usage, "prompt_tokens_details"), "cached_tokens")


def _object(holder: Json, name: str) -> Json:
    """Return the object at `name`; empty if there is none."""
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def _number(holder: Json, name: str) -> int:
    value = holder.get(name)
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def prompt_tokens(body: Json) -> int:
    """Return the number of tokens of a request's prompt, estimated for text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    return len(prompt_text(body).encode(errors="replace")) // BYTES_PER_TOKEN


def prompt_length(body: Json) -> float:
    """Return the length of a request's prompt in blocks, as its prefix is divided."""
    prompt = body.get("prompt")
    return len(prompt) / BLOCK_TOKENS if isinstance(prompt, list) else len(prompt_text(body)) / BLOCK_CHARS


def prompt_text(body: Json) -> str:
    """Return a request's prompt as one text, for comparing prefixes."""
    if "messages" not in body:
        return str(body.get("prompt", ""))
    return "".join(f"{turn.get('role')}\0{_text(turn.get('content'))}\0" for turn in body["messages"])


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\0".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content or "")
