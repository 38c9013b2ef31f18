"""Write-through of a simulated worker's blocks to KV tiers, while its loop is busy and while it is idle."""

from collections.abc import Callable

from runtime.serving.kv.tiers import BUSY_SHARE
from runtime.simulator.events import Events
from runtime.simulator.kv.prompt_blocks import PromptBlocks


class WriteThrough:
    """`is_idle` returns whether the loop has no other work."""

    def __init__(self, events: Events, prompts: PromptBlocks, is_idle: Callable[[], bool]) -> None:
        self._events, self._prompts, self._is_idle = events, prompts, is_idle
        self._until_ns = 0  # end of the current writes
        self._planned = False

    @property
    def left_ns(self) -> int:
        """Remaining time of the current writes."""
        return max(self._until_ns - self._events.now_ns, 0)

    def write_for(self, busy_ns: int = 0) -> int:
        """Write for a share of the loop's busy time. Return the time of all writes, with those before evictions."""
        if busy_ns:
            self._prompts.tiers.write(busy_ns // BUSY_SHARE)
        took_ns = self._prompts.tiers.take_time_ns()
        self._until_ns = max(self._until_ns, self._events.now_ns) + took_ns
        return took_ns

    def write_when_idle(self) -> None:
        """Write one block at a time until the loop has other work."""
        if self._prompts.unsaved and not self._planned:
            self._planned = True
            self._events.at(max(self._until_ns, self._events.now_ns), self._write_one)

    def _write_one(self) -> None:
        self._planned = False
        if self._is_idle() and self._prompts.unsaved:
            self._prompts.tiers.write()
            self.write_for()
            self.write_when_idle()
