"""Malformed messages of a link between frontend and worker: counted, and logged at a bounded rate."""

import logging
import time
from collections.abc import Callable

_LOG_INTERVAL_NS = 10_000_000_000


class MalformedMessages:
    """Counter of the malformed messages of one link, with a rate-limited log: a faulty peer must not fill it."""

    def __init__(self, log: logging.Logger, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock` in ns."""
        self._log = log
        self._clock = clock
        self._next_ns = 0
        self._suppressed = 0
        self.count = 0

    def record(self, sender: str, reason: object) -> None:
        """Count a dropped message of `sender`, and log it unless one was logged within the last ten seconds."""
        self.count += 1
        now = self._clock()
        if now < self._next_ns:
            self._suppressed += 1
            return
        more = f" (and {self._suppressed} more since the last such line)" if self._suppressed else ""
        self._log.warning("dropped a malformed message from %s: %s%s", sender, reason, more)
        self._next_ns, self._suppressed = now + _LOG_INTERVAL_NS, 0
