"""One request's course: retrieve, assemble, have it written, probe, go on, until it ends."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from runtime.engines.openai.abilities import Abilities, Way, tokens_of
from runtime.engines.openai.assembly import Fitted, fit, inserted_text, room_for_passages, with_passages
from runtime.engines.openai.handover import Handover, Handovers, prompt_text
from runtime.engines.openai.probing import Probing
from runtime.engines.openai.relay import Relay
from runtime.engines.openai.sequel import budget, sequel, way_of, why_not
from runtime.engines.openai.server import StreamBroken
from runtime.engines.openai.servers import Member, Servers
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
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.query import PassageQuery
from runtime.serving import stages
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.frontend.requests import Piece, Request
from runtime.serving.frontend.router import prefix_blocks
from runtime.serving.http.passthrough import single_request_field
from runtime.serving.http.service import SearchSource
from runtime.serving.messages import Probe, Retrieved
from runtime.serving.model.text import last_question

log = logging.getLogger(__name__)

Json = dict[str, Any]

_PREFIX_BLOCKS = 1024  # 32,768 tokens: of longer prompts the beginning tells servers apart
_FITS = 4  # times that a probe's passages are tokenized until they have room


@dataclass(frozen=True, slots=True)
class Means:
    """What every request of the engine has in common."""

    servers: Servers
    search: SearchSource
    section: ServedSection
    restarts: RestartLimits
    handovers: Handovers
    clock: Callable[[], int]  # monotonic ns


class AnswerWriter:
    """Writes one request's answer. `tell` gets its pieces; `run` ends with the last, or raises what ended it."""

    def __init__(self, request: Request, sent: Json, means: Means, tell: Callable[[Piece], None]) -> None:
        self._request, self._means, self._tell = request, means, tell
        self._bare = self._sent = sent  # without and with passages
        self._asked = asked = request.generation
        retrieval = asked.retrieval
        self._probing = None
        if retrieval is not None and retrieval.every_tokens:
            self._probing = Probing(request.id, tell, means.search, retrieval, means.section.probe_tokens, means.clock)
        self._chat = "messages" in sent
        self._limit: int | None = sent.get("max_completion_tokens", sent.get("max_tokens"))
        if self._probing is not None and not self._chat:
            self._limit = asked.sampling.max_tokens  # OpenAI's 16 if the client does not say
        self._way: Way = ""
        self._member: Member | None = None
        self._stopped_ns = 0  # since when the answer stands still for a probe
        self._over: Probe | None = None  # the probe for which it does
        self._found: list[Passage] = []
        self._passage_tokens = 0
        self._waiting: Retrieved | None = None  # passages in the next request, told when that is accepted
        self._before: tuple[str, list[int]] | None = None  # the script without those of a probe
        self._relay = Relay(
            request.id,
            tell,
            means.clock,
            chat=self._chat,
            sent=sent,
            stops=asked.sampling.stop if self._probing else (),
        )
        self._relay.stamps[stages.RECEIVED] = asked.received_ns
        if isinstance(asked.prompt, tuple):
            self._relay.script.prompt_ids = list(asked.prompt)
        self._one_request = bool(single_request_field(sent))

    async def run(self) -> None:
        """Write the answer."""
        try:
            await self._retrieve()
            while not self._relay.ended:
                await self._have_written()
        finally:
            if self._probing is not None:
                self._probing.drop()

    # ---- before the first token

    async def _retrieve(self) -> None:
        retrieval, stamps = self._asked.retrieval, self._relay.stamps
        if retrieval is None:
            return

        def embedded() -> None:
            stamps[stages.EMBEDDED] = self._means.clock()

        text = last_question(self._asked.messages) if self._chat else str(self._asked.prompt)
        left_s = max(1e-3, (self._asked.deadline_ns - self._means.clock()) / 1e9)
        self._found = await self._means.search.search(
            PassageQuery(retrieval.collection, retrieval.k, text, wanted=retrieval.filter, hybrid=retrieval.hybrid),
            embedded=embedded,
            timeout_s=left_s,
        )
        stamps[stages.SEARCHED] = self._means.clock()
        texts = [turn.content for turn in self._asked.messages] if self._chat else [str(self._asked.prompt)]
        size = sum(len(text.encode(errors="replace")) for text in texts)
        most = self._means.section.passage_tokens
        self._assemble(room_for_passages(size, self._limit or 0, most, self._context()))

    def _assemble(self, tokens: int) -> None:
        """The request with about so many tokens of passages; the server has the last word on how many have room."""
        self._passage_tokens = tokens
        fitted = fit(self._found, tokens)
        retrieval = self._asked.retrieval
        self._sent = with_passages(self._bare, fitted, retrieval.place if retrieval else "system")
        stamps = dict(self._relay.stamps)
        self._waiting = Retrieved(self._request.id, fitted.used, stages=stamps, partial=fitted.partial)

    def _context(self) -> int:
        """The context's tokens: as configured, or the least of what the servers tell; 0: nobody does."""
        told = [member.abilities.context_tokens for member in self._means.servers.up if member.abilities]
        return self._means.section.context_tokens or min((size for size in told if size), default=0)

    # ---- a request to a server

    async def _have_written(self) -> None:
        """One request to a server, and again to another one if that is lost; then the probe that it stopped for."""
        avoid: list[Member] = []
        while True:
            if self._limit is not None and self._relay.told >= self._limit:
                self._relay.end("length")  # a server was lost between the last token and its end
                return
            member = await self._choose(avoid)
            try:
                await self._write(member)
            except (EngineFailed, EngineUnreachable, Overloaded) as error:
                self._means.servers.noted(member, error)
                self._again(error, last=isinstance(error, Overloaded) and len(avoid) + 1 >= len(self._means.servers.up))
                avoid.append(member)
            except ContextLengthExceeded:
                if self._with_less():
                    continue
                if not self._relay.told:
                    raise
                self._relay.end("length")  # its probes have filled the context
                return
            else:
                self._means.servers.noted(member, None)
                return
            finally:
                self._means.servers.leave(member)

    async def _choose(self, avoid: list[Member]) -> Member:
        """A server, awaited for a bounded time if none answers."""
        servers, now = self._means.servers, self._means.clock()
        until_ns = min(self._asked.deadline_ns, now + self._means.restarts.wait_ns)
        while True:
            try:
                return servers.choose(self._fits, avoid, self._prefix())
            except EngineUnreachable as error:
                left_s = (until_ns - self._means.clock()) / 1e9
                if left_s <= 0:
                    raise self._lost(error) from error
                try:
                    async with asyncio.timeout(left_s):
                        await servers.changed.wait()
                except TimeoutError:
                    raise self._lost(error) from error

    def _prefix(self) -> tuple[int, ...]:
        """The leading blocks of what the next request has before it."""
        script, prompt = self._relay.script, self._sent.get("prompt")
        if self._relay.told and self._way == "tokens":
            return prefix_blocks([*(script.prompt_ids or ()), *script.ids], _PREFIX_BLOCKS)
        if isinstance(prompt, list):
            return prefix_blocks(prompt, _PREFIX_BLOCKS)
        return prefix_blocks(prompt_text(self._sent) + script.text, _PREFIX_BLOCKS)

    def _fits(self, abilities: Abilities) -> InvalidRequest | None:
        refused = why_not(abilities, self._sent, probes=self._probing is not None)
        if refused is None and self._relay.told and way_of(abilities, self._sent) != self._way:
            return InvalidRequest("no server that answers can go on with the answer")
        return refused

    def _again(self, error: TrinityError, *, last: bool) -> None:
        """Raise, unless the request may be sent once more."""
        request, limits = self._request, self._means.restarts
        goes_on = not self._relay.told or (self._way and not self._one_request)
        if last or not goes_on or request.resends >= limits.times:
            raise self._lost(error) from error
        request.resends += 1
        log.info("goes on after %d tokens: %s", self._relay.told, error.message, extra={"request": request.id})

    def _lost(self, error: TrinityError) -> TrinityError:
        told = self._relay.told
        return WorkerLost(f"after {told} tokens of the answer: {error.message}") if told else error

    async def _write(self, member: Member) -> None:
        assert member.abilities is not None, "it was chosen because it answers"
        self._member, relay, clock = member, self._relay, self._means.clock
        prefix = self._prefix()
        overlap = member.overlap(prefix)
        self._means.servers.remember(member, prefix)
        path, body = await self._next_request(member, member.abilities)
        relay.stamps.setdefault(stages.PREFILL_BEGIN, clock())
        handover: Handover | None = None
        if self._means.handovers.wanted(member, body, overlap):
            handover = await self._means.handovers.computed(body, path, prefix, self._request.id)
        asked_ns, fields = clock(), handover.fields if handover is not None else {}
        async with member.server.stream(path, body | fields, self._request.id) as chunks:
            relay.begin(budget(body, self._context()))
            async for chunk in chunks:
                if handover is not None:
                    self._means.handovers.taken(handover, clock() - asked_ns)
                    handover = None
                if self._waiting is not None or self._stopped_ns:
                    self._goes_on()
                relay.take(chunk)
                if relay.stopped:
                    relay.end("stop")
                    return
                if relay.cut:
                    log.info("%s writes on behind max_tokens: cut", member.name, extra={"request": self._request.id})
                    break
                if self._probing is not None and not self._probing.waits and await self._prefetched():
                    return
        if relay.finish_reason == "length" and self._stops_for_probe(body.get("max_tokens", 0)):
            relay.pause(body["max_tokens"])
            await self._probe()
        elif relay.finish_reason is None:
            raise StreamBroken(f"{member.name}: its stream ended without a finish_reason")
        else:
            relay.end()

    async def _next_request(self, member: Member, abilities: Abilities) -> tuple[str, Json]:
        relay, script = self._relay, self._relay.script
        if not relay.told:
            self._way = way_of(abilities, self._sent)
            path, body = "/chat/completions" if self._chat else "/completions", self._sent
            relay.whole_characters = self._way == "tokens" and self._continues
        else:
            if self._way == "tokens" and script.prompt_ids is None:
                raise EngineFailed(f"{member.name} did not tell the prompt's token ids")
            if self._way == "text" and self._chat and script.rendered is None:
                shown = await member.server.post("/apply-template", {"messages": self._sent["messages"]}, beside=True)
                script.rendered = str(shown.get("prompt", ""))
            path, body = sequel(self._way, self._sent, script)
            if "seed" in body:
                body = body | {"seed": body["seed"] + relay.requests}
            if "min_tokens" in body:
                body = body | {"min_tokens": max(0, body["min_tokens"] - relay.told)}
        body = body | {"model": self._means.section.name, "stream": True}
        if (limit := self._next_limit()) is not None:
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = limit
        if self._probing is not None:
            body.pop("stop", None)  # looked for here
        if abilities.usage:
            body["stream_options"] = body.get("stream_options", {}) | {"include_usage": True}
        if self._way == "tokens" and self._continues:
            body["return_token_ids"] = True
        return path, body

    @property
    def _continues(self) -> bool:
        """Whether the answer may have to go on in another request."""
        return self._probing is not None or (self._means.restarts.times > 0 and not self._one_request)

    def _next_limit(self) -> int | None:
        """Tokens of the next request; None: as the client said."""
        told, left = self._relay.told, None if self._limit is None else self._limit - self._relay.told
        if self._probing is None or not self._probing.waits:
            return left if told else None
        until_probe = self._probing.due - told
        return until_probe if left is None else min(left, until_probe)

    # ---- probes

    def _stops_for_probe(self, made: int) -> bool:
        """Whether the request has ended after these tokens because a probe was due, and the answer goes on."""
        goes_on = self._limit is None or self._relay.told_before + made < self._limit
        return self._probing is not None and self._probing.waits and goes_on

    async def _probe(self) -> None:
        """Ask, wait, and put what is new behind what was told."""
        assert self._probing is not None, "only answers with probes stop for one"
        self._stopped_ns = self._means.clock()
        self._probing.ask(self._relay.told, self._words())
        await self._insert(*await self._probing.take())

    async def _prefetched(self) -> bool:
        """Ask when it is time, and take in what has come; True if the answer is to go on with it in another request."""
        probing, relay = self._probing, self._relay
        assert probing is not None, "only answers with probes are asked"
        if probing.came and relay.finish_reason is None:
            new, probe = await probing.take()
            if new:
                self._stopped_ns = self._means.clock()
                await self._insert(new, probe)
                return True
            relay.probes.append(probe)
        if relay.told >= probing.due:
            probing.ask(relay.told, self._words())
        return False

    async def _insert(self, new: list[Passage], probe: Probe) -> None:
        """Put what has room of the new passages behind what was told."""
        fitted, ids = await self._fitted(new)
        self._over = replace(probe, passages=len(fitted.used))
        if fitted.used:
            script = self._relay.script
            if self._member is not None and self._way == "tokens":
                self._means.servers.remember(self._member, self._prefix())  # by which the next request finds it
            self._before = (script.text, list(script.ids))
            script.add(inserted_text(fitted), ids)
            self._waiting = Retrieved(self._request.id, fitted.used, self._relay.told, tuple(ids))

    async def _fitted(self, new: list[Passage]) -> tuple[Fitted, list[int]]:
        """As many passages as have room, and their tokens if the answer goes on by these: then they are counted."""
        assert self._probing is not None, "only answers with probes get passages"
        most = min(self._probing.most_tokens, self._room())
        if self._way != "tokens":
            return fit(new, most), []
        assert self._member is not None, "a request has run"
        size = most
        for _ in range(_FITS):
            fitted = fit(new, size)
            if not fitted.used:
                break
            ids = await tokens_of(self._member.server, self._means.section.name, inserted_text(fitted))
            if ids is None:
                break
            if len(ids) <= most:
                return fitted, ids
            size = size * most // len(ids)
        return Fitted(), []

    def _goes_on(self) -> None:
        """The first chunk of a request is here: what went into it can be told."""
        if self._waiting is not None:
            if self._probing is not None:
                self._probing.seen.update(passage.id for passage in self._waiting.passages)
            self._tell(self._waiting)
            self._waiting = self._before = None
        if self._stopped_ns:
            stalled = self._means.clock() - self._stopped_ns
            self._relay.stalled_ns += stalled
            self._stopped_ns = 0
            if self._over is not None:
                self._relay.probes.append(replace(self._over, stalled_ns=stalled))
                self._over = None

    def _with_less(self) -> bool:
        """A request has more tokens than the context: leave passages out of it. False if it has none."""
        if self._waiting is None:
            return False
        if self._before is not None:
            script = self._relay.script
            script.text, script.ids = self._before
            self._waiting = self._before = None
            return True
        if not self._waiting.passages:
            return False
        self._assemble(self._passage_tokens // 2)
        return True

    def _words(self) -> str:
        return f"{last_question(self._asked.messages) if self._chat else self._asked.prompt}\n{self._relay.script.text}"

    def _room(self) -> int:
        """Tokens of the context that are left for a probe's passages, as far as it is known."""
        context, usage, script = self._context(), self._relay.usage, self._relay.script
        used = int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0)) if usage else 0
        if script.prompt_ids is not None:
            used = len(script.prompt_ids) + len(script.ids)
        if not context or not used:
            return self._means.section.probe_tokens
        return max(0, context - used - max(1, (self._limit or 0) - self._relay.told))
