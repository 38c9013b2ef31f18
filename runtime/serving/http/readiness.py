"""Drain state of the node, reported by /health and /ready.

A draining node first reports that it drains and still answers requests, so that load balancers notice before the port
closes and no request is refused in between.
"""

import time
from collections import deque
from collections.abc import Callable

WATCHED_S = 30.0


class Readiness:
    """Drain state. A node that is watched accepts requests for `notice_s` after it has begun to drain.

    It is watched if it has reported ready twice within the last 30 s: load balancers poll, people look once. An
    unwatched node need not wait to be noticed. `clock` returns seconds.
    """

    def __init__(self, notice_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice_s, self._clock = notice_s, clock
        self._reported_ready: deque[float] = deque(maxlen=2)
        self._notice_until = 0.0
        self.draining = False

    @property
    def notice_elapsed(self) -> bool:
        """Whether the node drains and its watchers have had time to notice."""
        return self.draining and self._clock() >= self._notice_until

    def record_ready(self) -> None:
        """Record that a health check returned ready."""
        self._reported_ready.append(self._clock())

    def drain(self, wanted: bool) -> None:
        """Start or cancel draining. Idempotent."""
        if wanted and not self.draining:
            now = self._clock()
            watched = len(self._reported_ready) == 2 and now - self._reported_ready[0] <= WATCHED_S
            self._notice_until = now + (self._notice_s if watched else 0.0)
        self.draining = wanted
