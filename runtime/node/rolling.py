"""A rolling restart: one worker after the other drains, ends and comes back, while the others serve."""

import logging
import signal
from collections import deque
from collections.abc import Sequence

from runtime.node.child import Child, Phase

log = logging.getLogger("supervisor")


class Rolling:
    """The workers that are to be restarted, and the one that is just now. `drain_s` bounds each one's drain."""

    def __init__(self, children: Sequence[Child], drain_s: float) -> None:
        self._children = children  # the supervisor's own: workers come and go
        self._drain_s = drain_s
        self._waiting: deque[Child] = deque()
        self._current: Child | None = None

    def ask(self, name: str) -> str:
        """Restart one worker, or with "" all of them. Returns what is wrong with that, "" if nothing is."""
        chosen = [child for child in self._children if not name or child.name == name]
        if not chosen:
            return f"no worker {name!r}; there are {', '.join(child.name for child in self._children)}"
        for child in chosen:
            if child not in self._waiting and child is not self._current:
                self._waiting.append(child)
        return ""

    def step(self, now_s: float) -> None:
        """Go on where that is possible: the next begins only when every worker is ready."""
        child = self._current
        if child is not None and child.rolling:
            if child.phase is Phase.DRAINING and now_s > child.due:
                log.warning("%s has not drained within %.0f s: killed", child.name, self._drain_s)
                child.kill_group()
                child.due = float("inf")
            return
        if not all(child.phase is Phase.READY for child in self._children):
            return
        self._current = None
        while self._waiting and self._waiting[0] not in self._children:  # it has left the node meanwhile
            self._waiting.popleft()
        if self._waiting:
            self._current = child = self._waiting.popleft()
            log.info("%s restarts: it drains first", child.name)
            child.rolling, child.phase, child.due = True, Phase.DRAINING, now_s + self._drain_s
            child.send(signal.SIGHUP)
