"""Which server takes a request: the least loaded of those that answer and can do it. Who is down is asked again."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass

from runtime.engines.openai.abilities import Abilities
from runtime.engines.openai.server import Server, StreamBroken
from runtime.errors import ConfigError, EngineRefusedKey, EngineUnreachable, InvalidRequest, Overloaded, TrinityError
from runtime.node.supervisor.backoff import Backoff

log = logging.getLogger(__name__)

Ask = Callable[[Server], Awaitable[Abilities]]
Fits = Callable[[Abilities], InvalidRequest | None]

_FAULTS = 3
_LOOK_S = 10.0


@dataclass(slots=True, eq=False)
class Member:
    """A server and what is known of it. `abilities` None: it is down, to be asked again at `due_ns`."""

    server: Server
    backoff: Backoff
    abilities: Abilities | None = None
    problem: str = "it was not asked yet"
    in_flight: int = 0
    turn: int = 0  # the choices made until it was chosen last
    due_ns: int = 0
    up_ns: int = 0
    asking: bool = False
    faults: int = 0  # requests in a row that it failed

    @property
    def name(self) -> str:
        return self.server.url


class Servers:
    """All servers of a model. `ask` finds out what one can do (`abilities.ask`). One that is down is asked again at
    least every `look_s`."""

    def __init__(
        self,
        servers: Sequence[Server],
        ask: Ask,
        clock: Callable[[], int] = time.monotonic_ns,
        source: random.Random | None = None,
        look_s: float = _LOOK_S,
    ) -> None:
        source = source or random.Random()
        self.members = [Member(server, Backoff(source, most_s=look_s)) for server in servers]
        self._ask, self._clock = ask, clock
        self._turns = 0
        self.changed = asyncio.Event()
        """Set whenever a server has come back."""

    @property
    def up(self) -> list[Member]:
        """Those that answer."""
        return [member for member in self.members if member.abilities is not None]

    def fitting(self, fits: Fits) -> list[Member]:
        """The servers that answer and can take a request: `fits` says why one cannot.

        Raises EngineUnreachable if none answers, else what it says if none fits.
        """
        up = [(member, member.abilities) for member in self.members if member.abilities is not None]
        if not up:
            problems = "; ".join(member.problem for member in self.members)
            raise EngineUnreachable(f"no server of the model answers: {problems}")
        refusals = [(member, fits(abilities)) for member, abilities in up]
        fitting = [member for member, refusal in refusals if refusal is None]
        if not fitting:
            raise next(refusal for _, refusal in refusals if refusal is not None)
        return fitting

    def choose(self, fits: Fits, avoid: Collection[Member] = ()) -> Member:
        """The fitting server with the fewest requests in flight; among equals the one that was chosen longest ago.
        Those to `avoid` are taken only if there is no other. Raises as `fitting`. `leave` must follow.
        """
        fitting = self.fitting(fits)
        chosen = min(fitting, key=lambda member: (member in avoid, member.in_flight, member.turn))
        self._turns += 1
        chosen.turn = self._turns
        chosen.in_flight += 1
        return chosen

    def leave(self, member: Member) -> None:
        """A request is not on that server any more."""
        member.in_flight -= 1

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
        """Ask all of them for the first time. Raises ConfigError for what no waiting mends."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._first(member)) for member in self.members]
        if refused := [error for task in tasks if (error := task.result()) is not None]:
            raise refused[0]

    def due(self) -> list[Coroutine[None, None, None]]:
        """To be run: each asks a server again that is down. One that takes its time keeps no other waiting."""
        found = [m for m in self.members if m.abilities is None and not m.asking and m.due_ns <= self._clock()]
        for member in found:
            member.asking = True
        return [self._again(member) for member in found]

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
        try:
            await self._look_at(member)
        except ConfigError as error:  # it has come back as another server; the node goes on without it
            self.failed(member, error)

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
                log.warning("%s is not used until it answers: %s", member.name, error.message)
            return
        finally:
            member.asking = False
        member.abilities, member.up_ns, member.problem, member.faults = found, self._clock(), "", 0
        log.info("%s answers: %s", member.name, found)
        for missing in found.lacking():
            log.warning("%s has %s", member.name, missing)
        self.changed.set()
        self.changed.clear()

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(member.server.close() for member in self.members))
