"""Messages that are none of the protocol's: all are counted, and one line is logged for many."""

import logging
import time
from collections.abc import Callable

_EVERY_NS = 10_000_000_000


class MalformedMessages:
    """Those that came in over one link. A peer that sends nothing else must not fill the log."""

    def __init__(self, log: logging.Logger, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock` in ns."""
        self._log = log
        self._clock = clock
        self._next_ns = 0
        self._unsaid = 0
        self.count = 0

    def dropped(self, sender: str, reason: object) -> None:
        """One from `sender` was dropped: counted, and logged unless another one was within ten seconds."""
        self.count += 1
        now = self._clock()
        if now < self._next_ns:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more since the last such line)" if self._unsaid else ""
        self._log.warning("dropped a malformed message from %s: %s%s", sender, reason, more)
        self._next_ns, self._unsaid = now + _EVERY_NS, 0
