"""A simulated worker's blocks on their way to KV tiers: beside what its loop does, and while it has nothing to do."""

from collections.abc import Callable

from runtime.serving.kv.tiers import BUSY_SHARE
from runtime.simulator.events import Events
from runtime.simulator.kv.prompt_blocks import PromptBlocks


class WriteThrough:
    """`rests` says whether the loop has nothing else to do."""

    def __init__(self, events: Events, prompts: PromptBlocks, rests: Callable[[], bool]) -> None:
        self._events, self._prompts, self._rests = events, prompts, rests
        self._until_ns = 0  # the loop writes until then
        self._planned = False

    @property
    def left_ns(self) -> int:
        """How long the loop still writes."""
        return max(self._until_ns - self._events.now_ns, 0)

    def beside(self, busy_ns: int = 0) -> int:
        """Write for a share of what the loop was busy; what that takes, and what was written to make room, in ns."""
        if busy_ns:
            self._prompts.tiers.write(busy_ns // BUSY_SHARE)
        took_ns = self._prompts.tiers.take_time_ns()
        self._until_ns = max(self._until_ns, self._events.now_ns) + took_ns
        return took_ns

    def idle(self) -> None:
        """The loop has nothing else to do: one block after the other, until it has."""
        if self._prompts.unsaved and not self._planned:
            self._planned = True
            self._events.at(max(self._until_ns, self._events.now_ns), self._next)

    def _next(self) -> None:
        self._planned = False
        if self._rests() and self._prompts.unsaved:
            self._prompts.tiers.write()
            self.beside()
            self.idle()
