"""One request from retrieval to its end: retrieve, assemble the prompt, stream from a server, probe, continue."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from runtime.engines.openai.assembly import fit, inserted_text, room_for_passages, with_passages
from runtime.engines.openai.capabilities import Capabilities, Continuation
from runtime.engines.openai.continuation import continuation_method, continuation_request, unsupported
from runtime.engines.openai.handover import Handovers, prompt_length, prompt_text
from runtime.engines.openai.load_balancer import Backend, LoadBalancer
from runtime.engines.openai.probing import Probing, fit_tokens
from runtime.engines.openai.relay import Relay
from runtime.engines.openai.server import StreamBroken
from runtime.engines.openai.signals import EngineSignals, Row
from runtime.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineUnreachable,
    InvalidRequest,
    Overloaded,
    TrinityError,
    WorkerLost,
)
from runtime.node.engine_config import ServedSection
from runtime.node.retrieval_config import PROBE_TOKENS, PromptsSection
from runtime.retrieval.passages import FoundPassages, Passage, ignore_size, within, without_text
from runtime.serving import stages
from runtime.serving.frontend.choice import prefix_blocks
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.frontend.requests import Piece, Request
from runtime.serving.http.passthrough import single_request_field
from runtime.serving.http.service import Collections
from runtime.serving.messages import Probe, Retrieved
from runtime.serving.model.text import last_question

log = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(slots=True)
class Dependencies:
    """Objects that all requests of the engine share. `restarts` changes as the node stops."""

    balancer: LoadBalancer
    search: Collections
    section: ServedSection
    prompts: PromptsSection
    restarts: RestartLimits
    handovers: Handovers
    signals: EngineSignals
    clock: Callable[[], int]  # monotonic ns


@dataclass(slots=True)
class Added:
    """What a request adds, until its server accepts it: passages, which are `reported` then, with the transcript's
    characters and tokens `before` those of a probe; and the `probe` that the answer waits for."""

    reported: Retrieved | None = None
    before: tuple[int, int] | None = None
    probe: Probe | None = None


class AnswerWriter:
    """Writes one request's answer. `emit` gets its pieces; `run` returns after the last one, or raises."""

    def __init__(self, request: Request, body: Json, deps: Dependencies, emit: Callable[[Piece], None]) -> None:
        self._request, self._deps, self._emit = request, deps, emit
        self._original = self._body = body  # without and with passages
        self._generation = generation = request.generation
        retrieval = generation.retrieval
        self._probing, self._seen = None, set[str]()  # ids of the passages in the answer's context
        if retrieval is not None and retrieval.every_tokens:
            self._probing = Probing(deps.search, retrieval, self._seen, deps.clock)
        self._chat = "messages" in body
        self._max_tokens: int | None = body.get("max_completion_tokens", body.get("max_tokens"))
        if self._probing is not None and not self._chat:
            self._max_tokens = generation.sampling.max_tokens  # OpenAI's 16 if the client does not say
        self._method: Continuation = ""
        self._found, self._passages = FoundPassages(), list[Passage]()
        self._passage_tokens = 0
        self._added: Added | None = None
        self._row = Row(deps.signals)
        self._relay = Relay(
            request.id,
            self._row.counting(emit),
            deps.clock,
            chat=self._chat,
            body=body,
            stops=generation.sampling.stop if self._probing else (),
        )
        self._relay.stamps[stages.RECEIVED] = generation.received_ns
        if isinstance(generation.prompt, tuple):
            self._relay.transcript.prompt_ids = list(generation.prompt)
        self._single_request = bool(single_request_field(body))

    async def run(self) -> None:
        """Write the answer."""
        try:
            await self._retrieve()
            while not self._relay.ended:
                await self._stream_once()
        finally:
            self._row.end()
            if self._probing is not None:
                self._probing.cancel()

    # ---- before the first token

    async def _retrieve(self) -> None:
        retrieval, stamps = self._generation.retrieval, self._relay.stamps
        if retrieval is None:
            return

        def on_embedded() -> None:
            stamps[stages.EMBEDDED] = self._deps.clock()

        text = last_question(self._generation.messages) if self._chat else str(self._generation.prompt)
        left_s = max(1e-3, (self._generation.deadline_ns - self._deps.clock()) / 1e9)
        query, search = retrieval.query(text, "prefill"), self._deps.search.search
        retrieved = await search(query, on_embedded=on_embedded, on_read=ignore_size, timeout_s=left_s)
        self._found = FoundPassages.of(retrieved)
        self._passages = within(self._found, retrieval.max_distance)
        stages.stamp_search_end(stamps, self._found.times, self._deps.clock())
        texts = [turn.content for turn in self._generation.messages] if self._chat else [str(self._generation.prompt)]
        size = sum(len(text.encode(errors="replace")) for text in texts)
        budget_tokens = self._deps.prompts.passage_tokens
        self._assemble(room_for_passages(size, self._max_tokens or 0, budget_tokens, self._context()))

    def _assemble(self, tokens: int) -> None:
        """Build the request with about this many tokens of passages; the server may still reject it as too long."""
        self._passage_tokens = tokens
        fitted = fit(self._passages, tokens)
        self._passages = list(fitted.used)  # the others fit no smaller budget either
        retrieval = self._generation.retrieval
        self._body = with_passages(self._original, fitted)
        stamps = dict(self._relay.stamps)
        texts = fitted.texts if retrieval and retrieval.quote else ()
        passages = without_text(fitted.used)
        self._added = Added(
            Retrieved(self._request.id, passages, stages=stamps, texts=texts, ranking=self._found.ranking)
        )

    def _context(self) -> int:
        """The context in tokens: as configured, else the least that a server reports; 0 if none does."""
        sizes = [backend.capabilities.context_tokens for backend in self._deps.balancer.up if backend.capabilities]
        return min((size for size in sizes if size), default=0)

    # ---- a request to a server

    async def _stream_once(self) -> None:
        """Run one request to a server, retried on others if that fails; then the probe that it stopped for."""
        avoid: list[Backend] = []
        while True:
            if self._max_tokens is not None and self._relay.sent_tokens >= self._max_tokens:
                self._relay.end("length")  # a server failed between the last token and its finish reason
                return
            backend = await self._choose(avoid)
            try:
                await self._write(backend)
            except (EngineFailed, EngineUnreachable, Overloaded) as error:
                self._deps.balancer.record_outcome(backend, error)
                self._retry_or_raise(
                    error, last=isinstance(error, Overloaded) and len(avoid) + 1 >= len(self._deps.balancer.answering)
                )
                avoid.append(backend)
            except ContextLengthExceeded:
                if self._drop_passages():
                    continue
                if not self._relay.sent_tokens:
                    raise
                self._relay.end("length")  # the probes' passages have filled the context
                return
            else:
                self._deps.balancer.record_outcome(backend, None)
                return
            finally:
                self._deps.balancer.release(backend)

    async def _choose(self, avoid: list[Backend]) -> Backend:
        """Choose a server; wait for one up to `restarts.wait_ns` while none is up."""
        balancer, now = self._deps.balancer, self._deps.clock()
        until_ns = min(self._generation.deadline_ns, now + self._deps.restarts.wait_ns)
        while True:
            try:
                return balancer.choose(self._reject, avoid, self._prefix())
            except EngineUnreachable as error:
                left_s = (until_ns - self._deps.clock()) / 1e9
                if left_s <= 0:
                    raise self._failure(error) from error
                try:
                    async with asyncio.timeout(left_s):
                        await balancer.changed.wait()
                except TimeoutError:
                    raise self._failure(error) from error

    def _prefix(self) -> tuple[int, ...]:
        """Return the leading blocks of the next request's prompt."""
        transcript, prompt = self._relay.transcript, self._body.get("prompt")
        if self._relay.sent_tokens and self._method == "tokens":
            return prefix_blocks([*(transcript.prompt_ids or ()), *transcript.ids])
        if isinstance(prompt, list):
            return prefix_blocks(prompt)
        return prefix_blocks(prompt_text(self._body) + transcript.text)

    def _reject(self, capabilities: Capabilities) -> InvalidRequest | None:
        if rejection := unsupported(capabilities, self._body, probes=self._probing is not None):
            return rejection
        if self._relay.sent_tokens and continuation_method(capabilities, self._body) != self._method:
            return InvalidRequest("no server that is up can continue the answer")
        return None

    def _retry_or_raise(self, error: TrinityError, *, last: bool) -> None:
        """Raise unless the request may be retried."""
        request, limits = self._request, self._deps.restarts
        can_continue = not self._relay.sent_tokens or (self._method and not self._single_request)
        if last or not can_continue or request.resends >= limits.times:
            raise self._failure(error) from error
        request.resends += 1
        self._deps.signals.retries += 1
        log.info("retried after %d tokens: %s", self._relay.sent_tokens, error.message, extra={"request": request.id})

    def _failure(self, error: TrinityError) -> TrinityError:
        sent = self._relay.sent_tokens
        return WorkerLost(f"after {sent} tokens of the answer: {error.message}") if sent else error

    async def _write(self, backend: Backend) -> None:
        assert backend.capabilities is not None, "a chosen server is up"
        relay = self._relay
        prefix = self._prefix()
        overlap, unlearned = backend.overlap(prefix), not relay.sent_tokens
        self._deps.balancer.remember(backend, prefix)
        path, body = await self._next_request(backend, backend.capabilities)
        relay.stamps.setdefault(stages.PREFILL_BEGIN, self._deps.clock())
        handovers, name = self._deps.handovers, self._request.id
        async with (
            handovers.hand_over(backend, body, path, prefix, overlap, name) as handover,
            backend.server.stream(path, body | handover.fields, name) as chunks,
        ):
            relay.begin()
            async for chunk in chunks:
                await self._request.wait_for_reader()
                handover.arrived()
                self._report_accepted()
                relay.feed(chunk)
                if unlearned and relay.transcript.prompt_ids is not None:
                    length, unlearned = prompt_length(self._body), False
                    self._deps.balancer.computed(backend, prefix, length, relay.transcript.prompt_ids)
                if relay.stopped:
                    relay.end("stop")
                    return
                if self._probing is not None and not self._probing.blocks and await self._prefetch(backend):
                    return
        if relay.finish_reason == "length" and self._stopped_for_probe(body.get("max_tokens", 0)):
            relay.pause(body["max_tokens"])
            await self._probe(backend)
        elif relay.finish_reason is None:
            raise StreamBroken(f"{backend.name}: its stream ended without a finish_reason")
        else:
            relay.end()

    async def _next_request(self, backend: Backend, capabilities: Capabilities) -> tuple[str, Json]:
        relay, transcript = self._relay, self._relay.transcript
        if not relay.sent_tokens:
            self._method = continuation_method(capabilities, self._body)
            path, body = "/chat/completions" if self._chat else "/completions", self._body
            relay.whole_characters = self._method == "tokens" and self._may_continue
        else:
            if self._method == "tokens" and transcript.prompt_ids is None:
                raise EngineFailed(f"{backend.name} did not return the prompt's token ids")
            if self._method == "text" and self._chat and transcript.rendered is None:
                response = await backend.server.post(
                    "/apply-template", {"messages": self._body["messages"]}, versioned=False
                )
                transcript.rendered = str(response.get("prompt", ""))
            path, body = continuation_request(self._method, self._body, transcript)
            if "seed" in body:
                body = body | {"seed": body["seed"] + relay.requests}
            if "min_tokens" in body:
                body = body | {"min_tokens": max(0, body["min_tokens"] - relay.sent_tokens)}
        body = body | {"model": self._deps.section.name, "stream": True}
        if (limit := self._next_limit()) is not None:
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = limit
        if self._probing is not None:
            body.pop("stop", None)  # detected in the relay
        if capabilities.usage:
            body["stream_options"] = body.get("stream_options", {}) | {"include_usage": True}
        if self._method == "tokens" and self._may_continue:
            body["return_token_ids"] = True
        return path, body

    @property
    def _may_continue(self) -> bool:
        """Whether the answer may continue in another request."""
        return self._probing is not None or (self._deps.restarts.times > 0 and not self._single_request)

    def _next_limit(self) -> int | None:
        """Return the token limit of the next request; None: the client's."""
        sent = self._relay.sent_tokens
        left = None if self._max_tokens is None else self._max_tokens - sent
        if self._probing is None or not self._probing.blocks:
            return left if sent else None
        until_probe = self._probing.due - sent
        return until_probe if left is None else min(left, until_probe)

    # ---- probes

    def _stopped_for_probe(self, made: int) -> bool:
        """Whether the request ended after `made` tokens for a probe, and the answer continues."""
        continues = self._max_tokens is None or self._relay.sent_tokens_before + made < self._max_tokens
        return self._probing is not None and self._probing.blocks and continues

    async def _probe(self, backend: Backend) -> None:
        """Run a probe while the answer waits; append its new passages."""
        assert self._probing is not None, "only answers with probes stop for one"
        self._probing.start(self._relay.sent_tokens, self._query())
        await self._insert(backend, *await self._row.stall(self._probing.result()))

    async def _prefetch(self, backend: Backend) -> bool:
        """Start a due probe, collect a finished one; True if its passages require another request."""
        probing, relay = self._probing, self._relay
        assert probing is not None, "only answers with probes prefetch"
        if probing.ready and relay.finish_reason is None:
            new, probe = await probing.result()
            if new:
                await self._insert(backend, new, probe)
                return True
            relay.probes.append(probe)
        if relay.sent_tokens >= probing.due:
            probing.start(relay.sent_tokens, self._query())
        return False

    async def _insert(self, backend: Backend, new: list[Passage], probe: Probe) -> None:
        """Append the new passages that fit to the transcript."""
        assert self._probing is not None, "only answers with probes get passages"
        limit = min(self._probing.max_tokens, self._room())
        fitted, ids = fit(new, limit), list[int]()
        if self._method == "tokens":  # counted exactly
            fitted, ids = await fit_tokens(backend.server, self._deps.section.name, new, limit)
        self._added = Added(probe=replace(probe, passages=len(fitted.used)))
        if fitted.used:
            transcript = self._relay.transcript
            if self._method == "tokens":
                self._deps.balancer.remember(backend, self._prefix())  # the next request is routed by it
            self._added.before = len(transcript.text), len(transcript.ids)
            transcript.add(inserted_text(fitted), ids)
            self._added.reported = Retrieved(
                self._request.id, without_text(fitted.used), self._relay.sent_tokens, tuple(ids)
            )

    def _report_accepted(self) -> None:
        """Report the passages and the stall, once the first chunk shows that the server has accepted the request."""
        if (added := self._added) is None:
            return
        self._added = None
        if added.reported is not None:
            self._seen.update(passage.id for passage in added.reported.passages)
            self._emit(added.reported)
        if added.probe is not None and self._probing is not None:
            since_ns = added.probe.begin_ns if self._probing.blocks else added.probe.end_ns
            probe = replace(added.probe, stalled_ns=self._deps.clock() - since_ns)
            self._relay.stalled_ns += probe.stalled_ns
            self._relay.probes.append(probe)

    def _drop_passages(self) -> bool:
        """Remove passages from a request that exceeds the context; False if it has none."""
        if (added := self._added) is None or added.reported is None or not added.reported.passages:
            return False
        if added.before is not None:
            (characters, tokens), transcript = added.before, self._relay.transcript
            transcript.text, transcript.ids = transcript.text[:characters], transcript.ids[:tokens]
            added.reported = added.before = None
            return True
        self._assemble(self._passage_tokens // 2)
        return True

    def _query(self) -> str:
        question = last_question(self._generation.messages) if self._chat else self._generation.prompt
        return f"{question}\n{self._relay.transcript.text}"

    def _room(self) -> int:
        """Return the context's tokens left for a probe's passages; the default limit if the context is unknown."""
        context, usage, transcript = self._context(), self._relay.usage, self._relay.transcript
        used = int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0)) if usage else 0
        if transcript.prompt_ids is not None:
            used = len(transcript.prompt_ids) + len(transcript.ids)
        if not context or not used:
            return PROBE_TOKENS
        return max(0, context - used - max(1, (self._max_tokens or 0) - self._relay.sent_tokens))
