"""A rolling restart: one worker after the other drains, ends and comes back, while the others serve."""

import logging
from collections import deque
from collections.abc import Sequence

from runtime.node.supervisor.supervised_worker import Child, Desired, Phase

log = logging.getLogger("supervisor")


class Rolling:
    """The workers that are to be restarted, and whose turn it is."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children  # the supervisor's own: workers come and go
        self._waiting: deque[Child] = deque()

    def ask(self, name: str) -> str:
        """Restart one worker, or with "" all of them. Returns what is wrong with that, "" if nothing is."""
        chosen = [child for child in self._children if not name or child.name == name]
        if not chosen:
            return f"no worker {name!r}; there are {', '.join(child.name for child in self._children)}"
        for child in chosen:
            if child not in self._waiting and child.desired is not Desired.RESTART:
                self._waiting.append(child)
        return ""

    def step(self, now_s: float) -> None:
        """Go on where that is possible: the next begins when every worker is ready, but for those that cannot run.

        One of these is started at once, whatever its back-off: who asks for that may have mended what it lacked.
        """
        if not all(child.phase is Phase.READY or child.cannot_run for child in self._children):
            return
        while self._waiting:
            child = self._waiting.popleft()
            if child not in self._children or child.desired is Desired.GONE:  # it has left the node meanwhile
                continue
            if child.phase is Phase.READY:
                log.info("%s restarts: it drains first", child.name)
                child.desired = Desired.RESTART
            elif child.phase is Phase.BACKOFF:
                child.due = now_s
            return
