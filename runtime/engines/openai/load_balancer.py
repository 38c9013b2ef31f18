"""Load balancer of the OpenAI engine: chooses a server for each request and checks the health of all servers.

The rule is that of the node's own workers (`runtime.serving.frontend.choice`); a server whose KV cache is nearly full
has no room.

With separate prefill and decode servers, decode servers write the answers; while none of them is up, prefill servers
do, which are capable of the same, unless servers work in pairs only.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass

from runtime.engines.openai.capabilities import Capabilities
from runtime.engines.openai.kv_events import ServerBlocks, follow
from runtime.engines.openai.load import Load, parse_load
from runtime.engines.openai.server import PrefillFailed, Server, StreamBroken
from runtime.errors import ConfigError, EngineRefusedKey, EngineUnreachable, InvalidRequest, Overloaded, TrinityError
from runtime.node.supervisor.backoff import Backoff
from runtime.serving.frontend.cached_blocks import PrefixKeys
from runtime.serving.frontend.choice import Candidate, Choice, PrefixHistory

log = logging.getLogger(__name__)

DetectCapabilities = Callable[[Server], Awaitable[Capabilities]]
Reject = Callable[[Capabilities], InvalidRequest | None]
"""Returns the error for a request that a server cannot run; None if it can."""

_MAX_FAILURES = 3
_KV_NEARLY_FULL = 0.9  # share of its KV
_INTERVAL_NS = 1_000_000_000  # between looks at a server that is up
_PREFIX_BLOCKS = 65_536  # remembered for each server
_MAX_BACKOFF_S = 10.0
_TIMEOUT_S = 5.0  # of a check
_IDLE_NS = 4_000_000_000  # without a request, after which a look asks whether it is there: within five seconds


@dataclass(slots=True, eq=False, kw_only=True)
class Backend(Candidate):
    """A server and its state. `capabilities` None: it is down until a check succeeds; the next one, or the next look at
    one that is up, is at `next_check_ns`. `reported`: its last load, None without metrics."""

    server: Server
    backoff: Backoff
    cached: ServerBlocks | None = None
    capabilities: Capabilities | None = None
    last_error: str = "not checked yet"
    next_check_ns: int = 0
    up_ns: int = 0
    last_used_ns: int = 0  # of the last request or check
    checking: bool = False
    check_timeout_s: float = _TIMEOUT_S  # while it is down; doubles with each timeout
    consecutive_failures: int = 0  # of requests
    reported: Load | None = None
    has_metrics: bool = True
    link_busy_s: float = 0.0  # growth of the reported one since the balancer's start

    @property
    def name(self) -> str:
        return self.server.url

    @property
    def reported_load(self) -> int:
        return self.reported.requests if self.reported else 0

    @property
    def is_full(self) -> bool:
        """Whether a new request may have to wait for room in its KV cache, or may preempt others."""
        return self.reported is not None and self.reported.kv_usage > _KV_NEARLY_FULL


class LoadBalancer:
    """All servers of a model. `detect` returns a server's capabilities (`capabilities.detect_capabilities`).

    A server that is down is checked with exponential back-off of at most `max_backoff_s`. `advice` is appended to the
    log line about it. `paired`: decode servers need a prefill server for each request.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        detect: DetectCapabilities,
        clock: Callable[[], int] = time.monotonic_ns,
        source: random.Random | None = None,
        max_backoff_s: float = _MAX_BACKOFF_S,
        advice: str = "",
        overlap_weight: float = 1.0,
        paired: bool = False,
    ) -> None:
        source, known = source or random.Random(), dict[int, PrefixKeys]()
        self.backends = [
            Backend(
                server=server,
                backoff=Backoff(source, most_s=max_backoff_s),
                cached=ServerBlocks(clock, known) if server.events is not None else None,
            )
            for server in servers
        ]
        self._detect, self._clock, self._advice = detect, clock, advice and f"; {advice}"
        self._choice, self._paired = Choice(overlap_weight), paired
        self.changed = asyncio.Event()
        """Set and cleared whenever a server has come up."""

    @property
    def up(self) -> list[Backend]:
        """Servers that are up and accept requests."""
        return [backend for backend in self.backends if backend.capabilities is not None and backend.server.accepting]

    @property
    def answering(self) -> list[Backend]:
        """Those of them that can write answers."""
        if not self._paired:
            return self.up
        decode = [backend for backend in self.up if backend.server.stage == "decode"]
        return decode if len(decode) < len(self.up) else []

    @property
    def links(self) -> int:
        """Number of KV links whose use is known: those of servers that have reported a transfer."""
        return sum(one.server.ranks for one in self.up if one.reported is not None and one.reported.link_busy_s > 0)

    @property
    def link_busy_s(self) -> float:
        """Time in which these links transferred KV, summed over them, since the start."""
        return sum(backend.link_busy_s for backend in self.backends)

    def eligible(self, reject: Reject) -> list[Backend]:
        """Return the servers that can write answers and do not `reject` a request.

        Raises EngineUnreachable if there is none, the first rejection if all reject.
        """
        up = [(backend, backend.capabilities) for backend in self.answering if backend.capabilities is not None]
        if not up:
            errors = "; ".join(backend.last_error for backend in self.backends if backend not in self.up)
            raise EngineUnreachable(f"no server of the model answers: {errors}")
        rejections = [(backend, reject(capabilities)) for backend, capabilities in up]
        eligible = [backend for backend, rejection in rejections if rejection is None]
        if not eligible:
            raise next(rejection for _, rejection in rejections if rejection is not None)
        return eligible

    def choose(self, reject: Reject, avoid: Collection[Backend] = (), prefix: Sequence[int] = ()) -> Backend:
        """Acquire the cheapest eligible server for a prompt of these leading blocks; pair with `release`.

        Servers in `avoid` are chosen only if there is no other. Raises as `eligible`.
        """
        return self._acquire(
            self.eligible(reject), prefix, lambda backend: (backend in avoid, backend.server.stage == "prefill")
        )

    def choose_prefill(self, avoid: Collection[Backend], prefix: Sequence[int]) -> Backend | None:
        """Acquire the prefill server that computes such a prompt for another; pair with `release`.

        None if all prefill servers are down or in `avoid`.
        """
        able = [backend for backend in self.up if backend.server.stage == "prefill" and backend not in avoid]
        return self._acquire(able, prefix) if able else None

    def remember(self, backend: Backend, prefix: Sequence[int]) -> None:
        """Record that a server has the KV of these blocks, or soon will."""
        backend.prefixes.remember(prefix, _PREFIX_BLOCKS)

    def computed(self, backend: Backend, prefix: Sequence[int], length: float, prompt: list[int]) -> None:
        """Record the token ids of a prompt that a server has computed; its text has `length` blocks, these first."""
        views = {other.cached.prefixes: other.cached for other in self.backends if other.cached is not None}
        for view in views.values():
            view.learn(prefix, length, prompt)
        if backend.cached is not None:
            backend.cached.expect(prompt)

    def followers(self) -> list[Coroutine[None, None, None]]:
        """Return the readers of the servers' KV events, to be run until cancelled."""
        return [
            follow(backend.server.events, backend.cached)
            for backend in self.backends
            if backend.server.events is not None and backend.cached is not None
        ]

    def _acquire(
        self,
        backends: Sequence[Backend],
        prefix: Sequence[int],
        order: Callable[[Backend], tuple[bool, ...]] = lambda backend: (),
    ) -> Backend:
        chosen = self._choice.choose(
            backends, lambda one: (*order(one), self._choice.cost(one, prefix, full=one.is_full))
        )
        chosen.assigned += 1
        return chosen

    def release(self, backend: Backend) -> None:
        """Record that a request has left that server."""
        backend.assigned -= 1
        backend.last_used_ns = self._clock()

    def record_outcome(self, backend: Backend, error: TrinityError | None) -> None:
        """Record how a request ended there.

        A broken connection marks the server down at once. Errors that the server reports itself do so after
        `_MAX_FAILURES` in a row, because the request may be at fault.
        """
        if isinstance(error, Overloaded | PrefillFailed):
            return
        backend.consecutive_failures = backend.consecutive_failures + 1 if error is not None else 0
        broken = isinstance(error, EngineUnreachable | StreamBroken | EngineRefusedKey)
        failed = error is not None and (broken or backend.consecutive_failures >= _MAX_FAILURES)
        if error is not None and failed and backend.capabilities is not None:
            self.mark_down(backend, error)

    def mark_down(self, backend: Backend, error: TrinityError) -> None:
        """Send no requests to a server until a check succeeds."""
        if backend.capabilities is not None:
            log.warning("%s is down: %s", backend.name, error.message)
            ran_s = (self._clock() - backend.up_ns) / 1e9
        else:
            ran_s = 0.0
        backend.capabilities, backend.last_error = None, error.message
        backend.next_check_ns = self._clock() + int(backend.backoff.next_delay(ran_s) * 1e9)

    # ---- health and load checks

    async def check_all(self) -> None:
        """Check all servers for the first time. Raises ConfigError, with all connections closed, for a server that can
        never serve the configuration."""
        outcomes = await asyncio.gather(*map(self._check, self.backends), return_exceptions=True)
        if error := next((outcome for outcome in outcomes if outcome is not None), None):
            await self.close()
            raise error

    def checks_due(self) -> list[Coroutine[None, None, None]]:
        """Return the due checks, to be run concurrently: a slow server delays no other."""
        now = self._clock()
        for backend in self.backends:
            if backend.capabilities is not None and not backend.server.accepting:
                self.mark_down(backend, EngineUnreachable("it is shutting down"))
        due = [backend for backend in self.backends if not backend.checking and backend.next_check_ns <= now]
        for backend in due:
            backend.checking, backend.next_check_ns = True, now + _INTERVAL_NS
        return [self._run_check(backend) for backend in due]

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(backend.server.close() for backend in self.backends))

    async def _run_check(self, backend: Backend) -> None:
        """Check a server that is down again; of one that is up, whether it is still there if it has no requests, and
        its load if there is a choice."""
        idle_ns = self._clock() - max(backend.last_used_ns, backend.up_ns)
        try:
            if backend.capabilities is None:
                await self._check_again(backend)
            elif not backend.assigned and idle_ns >= _IDLE_NS:
                await self._check_idle(backend)
            if len(self.up) > 1 and backend in self.up and backend.has_metrics:
                await self._read_load(backend)
        finally:
            backend.checking = False

    async def _check_again(self, backend: Backend) -> None:
        """Check with a time limit: a server that has just started may never answer its first request."""
        try:
            async with asyncio.timeout(backend.check_timeout_s):
                await self._check(backend)
        except ConfigError as error:  # it was restarted with another model, say; the node goes on without it
            self.mark_down(backend, error)
        except TimeoutError:
            limit_s = backend.check_timeout_s
            self.mark_down(backend, EngineUnreachable(f"{backend.name} does not answer within {limit_s:g} s"))
            backend.check_timeout_s *= 2

    async def _check_idle(self, backend: Backend) -> None:
        """Mark a server down that refuses connections; a slow answer or an error may come from load."""
        backend.last_used_ns = self._clock()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await backend.server.get("/models")
        except EngineUnreachable as error:
            if backend.capabilities is not None:
                self.mark_down(backend, error)
        except (TrinityError, TimeoutError) as error:
            log.debug("%s: %s", backend.name, error)

    async def _read_load(self, backend: Backend) -> None:
        """Read a server's load; one without metrics is not asked again until it was down."""
        before = backend.reported
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                backend.reported = load = parse_load(await backend.server.metrics())
            if before is not None and load is not None:
                backend.link_busy_s += max(load.link_busy_s - before.link_busy_s, 0.0)  # less: it was restarted
        except (TrinityError, TimeoutError) as error:
            backend.reported = None
            if isinstance(error, EngineUnreachable | TimeoutError):
                return  # the next request there finds out
        backend.has_metrics = backend.reported is not None

    async def _check(self, backend: Backend) -> None:
        try:
            capabilities = await self._detect(backend.server)
        except ConfigError:
            raise
        except TrinityError as error:
            is_new = backend.last_error != error.message
            self.mark_down(backend, error)
            if is_new:
                log.warning("%s: it is not used until it answers%s", error.message, self._advice)
            return
        backend.capabilities, backend.up_ns = capabilities, self._clock()
        backend.last_error, backend.consecutive_failures = "", 0
        backend.check_timeout_s, backend.reported, backend.has_metrics = _TIMEOUT_S, None, True
        backend.prefixes = PrefixHistory()  # it may be another process
        log.info("%s answers: %s", backend.name, capabilities)
        for limitation in capabilities.limitations():
            log.warning("%s: %s", backend.name, limitation)
        self.changed.set()
        self.changed.clear()
