"""Which server takes a request, of those that answer and can do it. Who is down is asked again.

The rule is that of the node's own workers (`runtime.serving.frontend.router`): the fewest requests, less the share of
the prompt's leading blocks that the server has lately been given, one more for a server whose KV is nearly full. A full
overlap is worth `overlap_weight` requests, no more. So the turns of a conversation stay where its KV is. A server's
requests are the larger of what it reports and what it has been given here; among equals it is the one that was chosen
longest ago.

Where prefill and decode have servers of their own, answers are written by those of decode; while none of them answers
by the others too, which can do all that they can.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field

from runtime.engines.openai.abilities import Abilities
from runtime.engines.openai.server import Server, StreamBroken
from runtime.errors import ConfigError, EngineRefusedKey, EngineUnreachable, InvalidRequest, Overloaded, TrinityError
from runtime.node.supervisor.backoff import Backoff
from runtime.serving.frontend.router import Prefixes

# ---- how busy a server says that it is: vLLM's gauges, which others export too (llm-d asks for the same names)


_GAUGE = re.compile(r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^}]*\})? (\S+)", re.M)


@dataclass(frozen=True, slots=True)
class Load:
    """`kv_usage`: the share of its KV that is in use, 0..1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0

    @property
    def requests(self) -> int:
        """Requests that it has."""
        return self.running + self.waiting


def read_load(metrics: str) -> Load | None:
    """From metrics in Prometheus's text format; of several engines behind a server the sum, and the fullest KV. None
    if they do not tell."""
    found: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(metrics):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError:
            return None
    counts = [found.get(name) for name in ("num_requests_running", "num_requests_waiting")]
    if None in counts:
        return None
    running, waiting = (int(sum(count or ())) for count in counts)
    return Load(running, waiting, max(found.get("kv_cache_usage_perc", [0.0])))


log = logging.getLogger(__name__)

Ask = Callable[[Server], Awaitable[Abilities]]
Fits = Callable[[Abilities], InvalidRequest | None]

_FAULTS = 3
_FULL = 0.9  # of its KV: what comes now may have to wait, or have others wait
_LOAD_NS = 1_000_000_000  # between two looks at how busy a server is
_REMEMBERED = 65_536  # blocks of prompts, for each server
_LOOK_S = 10.0
_PATIENCE_NS = 5_000_000_000  # with a server that is asked again; twice as long after each time that it was in vain
_QUIET_NS = 5_000_000_000


@dataclass(slots=True, eq=False)
class Member:
    """A server and what is known of it. `abilities` None: it is down, to be asked again at `due_ns`; `load`: what it
    last said, None if it says nothing."""

    server: Server
    backoff: Backoff
    abilities: Abilities | None = None
    problem: str = "it was not asked yet"
    in_flight: int = 0
    turn: int = 0  # the choices made until it was chosen last
    due_ns: int = 0
    up_ns: int = 0
    heard_ns: int = 0  # when it last had a request, or was asked anything
    asking: bool = False
    patience_ns: int = _PATIENCE_NS
    late_ns: int = 0  # when the look that is out is given up, by its `limit`
    limit: asyncio.Timeout | None = None
    faults: int = 0  # requests in a row that it failed
    load: Load | None = None
    load_due_ns: int | None = 0  # None: it has no metrics
    prefixes: Prefixes = field(default_factory=Prefixes)

    @property
    def name(self) -> str:
        return self.server.url

    def cost(self, prefix: Sequence[int], overlap_weight: float) -> float:
        """Of a request more with these leading blocks: the fewer the better."""
        reported, full = (self.load.requests, self.load.kv_usage > _FULL) if self.load else (0, False)
        return max(reported, self.in_flight) - overlap_weight * self.overlap(prefix) + full

    def overlap(self, prefix: Sequence[int]) -> float:
        """The share of `prefix` that it has lately been given, 0..1."""
        return self.prefixes.seen(prefix) / len(prefix) if prefix else 0.0


class Servers:
    """All servers of a model. `ask` finds out what one can do (`abilities.ask`). One that is down is asked again at
    least every `look_s`; `advice` is for those who read of it."""

    def __init__(
        self,
        servers: Sequence[Server],
        ask: Ask,
        clock: Callable[[], int] = time.monotonic_ns,
        source: random.Random | None = None,
        look_s: float = _LOOK_S,
        advice: str = "",
        overlap_weight: float = 1.0,
    ) -> None:
        source = source or random.Random()
        self.members = [Member(server, Backoff(source, most_s=look_s)) for server in servers]
        self._ask, self._clock, self._advice = ask, clock, advice and f"; {advice}"
        self._overlap_weight = overlap_weight
        self._turns = 0
        self.changed = asyncio.Event()
        """Set whenever a server has come back."""

    @property
    def up(self) -> list[Member]:
        """Those that answer, and take what is new."""
        return [member for member in self.members if member.abilities is not None and member.server.listens]

    def fitting(self, fits: Fits) -> list[Member]:
        """The servers that answer and can take a request: `fits` says why one cannot.

        Raises EngineUnreachable if none answers, else what it says if none fits.
        """
        up = [(member, member.abilities) for member in self.up if member.abilities is not None]
        if not up:
            problems = "; ".join(member.problem for member in self.members)
            raise EngineUnreachable(f"no server of the model answers: {problems}")
        refusals = [(member, fits(abilities)) for member, abilities in up]
        fitting = [member for member, refusal in refusals if refusal is None]
        if not fitting:
            raise next(refusal for _, refusal in refusals if refusal is not None)
        return fitting

    def choose(self, fits: Fits, avoid: Collection[Member] = (), prefix: Sequence[int] = ()) -> Member:
        """The fitting server for an answer behind a prompt of these leading blocks. Those to `avoid` are taken only if
        there is no other. Raises as `fitting`. `leave` must follow.
        """
        return self._take(
            min(self.fitting(fits), key=lambda m: (m in avoid, m.server.stage == "prefill", *self._order(m, prefix)))
        )

    def choose_prefill(self, avoid: Collection[Member], prefix: Sequence[int]) -> Member | None:
        """The server that computes such a prompt for another, not one of those to `avoid`; None without any. `leave`
        must follow."""
        able = [member for member in self.up if member.server.stage == "prefill" and member not in avoid]
        return self._take(min(able, key=lambda m: self._order(m, prefix))) if able else None

    def _order(self, member: Member, prefix: Sequence[int]) -> tuple[float, int]:
        return member.cost(prefix, self._overlap_weight), member.turn

    def remember(self, member: Member, prefix: Sequence[int]) -> None:
        """A server has the KV of these blocks, or soon will."""
        member.prefixes.remember(prefix, _REMEMBERED, self._clock())

    def _take(self, chosen: Member) -> Member:
        self._turns += 1
        chosen.turn = self._turns
        chosen.in_flight += 1
        return chosen

    def leave(self, member: Member) -> None:
        """A request is not on that server any more."""
        member.in_flight -= 1
        member.heard_ns = self._clock()

    def noted(self, member: Member, error: TrinityError | None) -> None:
        """How a request went there. A server that breaks connections is down; one that answers with errors of its own
        is after `_FAULTS` in a row: what is wrong may be the request."""
        if isinstance(error, Overloaded):
            return
        member.faults = member.faults + 1 if error is not None else 0
        broken = isinstance(error, EngineUnreachable | StreamBroken | EngineRefusedKey)
        if error is not None and (broken or member.faults >= _FAULTS) and member.abilities is not None:
            self.failed(member, error)

    def failed(self, member: Member, error: TrinityError) -> None:
        """A server does not answer, or not as it should: it gets nothing until it has been asked again."""
        if member.abilities is not None:
            log.warning("%s is down: %s", member.name, error.message)
            ran_s = (self._clock() - member.up_ns) / 1e9
        else:
            ran_s = 0.0
        member.abilities, member.problem = None, error.message
        member.due_ns = self._clock() + int(member.backoff.next_delay(ran_s) * 1e9)

    async def reach(self) -> None:
        """Ask all of them for the first time. Raises ConfigError for what no waiting mends, with no connection left."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._first(member)) for member in self.members]
        if refused := [error for task in tasks if (error := task.result()) is not None]:
            await self.close()
            raise refused[0]

    def due(self) -> list[Coroutine[None, None, None]]:
        """To be run: each asks a server again that is down. One that takes its time keeps no other waiting, and is
        asked anew when it has taken too long."""
        for member in self.members:
            if member.limit is not None and member.late_ns <= self._clock():
                member.limit.reschedule(0.0)
                member.limit = None
            if member.abilities is not None and not member.server.listens:
                self.failed(member, EngineUnreachable("it takes nothing new"))
        found = [m for m in self.members if m.abilities is None and not m.asking and m.due_ns <= self._clock()]
        for member in found:
            member.asking = True
        return [self._again(member) for member in found]

    def loads_due(self) -> list[Coroutine[None, None, None]]:
        """To be run: each asks a server how busy it is, where there is a choice between several."""
        now = self._clock()
        found = [m for m in self.up if m.load_due_ns is not None and m.load_due_ns <= now] if len(self.up) > 1 else []
        for member in found:
            member.load_due_ns = now + _LOAD_NS
        return [self._ask_load(member) for member in found]

    def quiet(self) -> list[Coroutine[None, None, None]]:
        """To be run: each asks a server that has had no request for five seconds whether it is still there."""
        now = self._clock()
        found = [m for m in self.up if not m.in_flight and now - max(m.heard_ns, m.up_ns) >= _QUIET_NS]
        for member in found:
            member.heard_ns = now
        return [self._ask_quiet(member) for member in found]

    async def _ask_quiet(self, member: Member) -> None:
        """Only one that refuses connections is down: what takes its time, or answers with an error, may be busy."""
        try:
            async with asyncio.timeout(_QUIET_NS / 1e9):
                await member.server.get("/models")
        except EngineUnreachable as error:
            if member.abilities is not None:
                self.failed(member, error)
        except (TrinityError, TimeoutError) as error:
            log.debug("%s: %s", member.name, error)

    async def _ask_load(self, member: Member) -> None:
        """One without metrics is not asked for them again until it was down."""
        try:
            async with asyncio.timeout(_LOAD_NS * 5 / 1e9):
                member.load = read_load(await member.server.metrics())
        except (TrinityError, TimeoutError) as error:
            member.load = None
            if isinstance(error, EngineUnreachable | TimeoutError):
                return  # who asks for an answer finds out
        if member.load is None:
            member.load_due_ns = None

    async def look(self) -> None:
        """Ask all that are due."""
        await asyncio.gather(*self.due())

    async def _first(self, member: Member) -> ConfigError | None:
        try:
            await self._look_at(member)
        except ConfigError as error:
            return error
        return None

    async def _again(self, member: Member) -> None:
        """What hangs is given up by the clock (`due`): a server that was just started may never answer the first that
        it was asked, and those who wait for it wait for a bounded time."""
        member.late_ns = self._clock() + member.patience_ns
        try:
            async with asyncio.timeout(None) as member.limit:
                await self._look_at(member)
        except ConfigError as error:  # it has come back as another server; the node goes on without it
            self.failed(member, error)
        except TimeoutError:
            within_s = member.patience_ns / 1e9
            self.failed(member, EngineUnreachable(f"{member.name} does not answer within {within_s:g} s"))
            member.patience_ns *= 2
        finally:
            member.limit = None

    async def _look_at(self, member: Member) -> None:
        member.asking = True
        try:
            found = await self._ask(member.server)
        except ConfigError:
            raise
        except TrinityError as error:
            first = member.problem != error.message
            self.failed(member, error)
            if first:
                log.warning("%s: it is not used until it answers%s", error.message, self._advice)
            return
        finally:
            member.asking = False
        member.abilities, member.up_ns, member.problem, member.faults = found, self._clock(), "", 0
        member.patience_ns = _PATIENCE_NS
        member.load, member.load_due_ns, member.prefixes = None, 0, Prefixes()  # it may be another process
        log.info("%s answers: %s", member.name, found)
        for missing in found.lacking():
            log.warning("%s has %s", member.name, missing)
        self.changed.set()
        self.changed.clear()

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(member.server.close() for member in self.members))
