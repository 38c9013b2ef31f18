"""Early pulls: prompts whose KV a simulated decode worker copies while prefill computes them (`decode.handover_queue`).

Such a prompt has spare blocks only, and loses them to a complete prompt or to a row; it is then copied from the start.
"""

from dataclasses import dataclass

from runtime.simulator.kv.prompt_blocks import PromptBlocks
from runtime.simulator.kv.rows import KvRows
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.traces import Arrival


@dataclass(slots=True, eq=False)
class EarlyPull:
    """An early pull: `copied_ns` of copying are done, or in progress until `end_ns`, of `available_ns` that prefill has
    computed. Decode receives its offer at `ready_ns`. If it holds blocks (`held`), `found_tokens` were cached."""

    request: SimRequest
    ready_ns: int
    held: bool = False
    found_tokens: int = 0
    available_ns: int = 0
    copied_ns: int = 0
    end_ns: int = 0


class EarlyPulls:
    """The early pulls of one worker, in order of arrival, and their blocks where these are counted."""

    def __init__(self, kv: KvRows | None, prompts: PromptBlocks | None) -> None:
        self._kv, self._prompts = kv, prompts
        self._all: dict[SimRequest, EarlyPull] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, request: SimRequest, ready_ns: int) -> EarlyPull:
        """Return the early pull of a prompt; a new one is received at `ready_ns`."""
        return self._all.setdefault(request, EarlyPull(request, ready_ns))

    def first(self, now_ns: int) -> EarlyPull | None:
        """Return the first pull that has KV to copy now."""
        for early in self._all.values():
            if early.held and early.available_ns > early.copied_ns and max(early.ready_ns, early.end_ns) <= now_ns:
                return early
        return None

    def get(self, request: SimRequest) -> EarlyPull | None:
        return self._all.get(request)

    def pop(self, request: SimRequest) -> EarlyPull | None:
        """Remove the pull of a prompt that is complete or has ended."""
        return self._all.pop(request, None)

    # ---- blocks

    def has_room(self, arrival: Arrival, running: int) -> bool:
        """Return whether there are blocks for a prompt plus one for each running row."""
        if self._kv is not None and not self._kv.has_room(arrival.prompt_tokens, running):
            return False
        return self._prompts is None or self._prompts.has_room(arrival)

    def take(self, early: EarlyPull, running: int, *, preempted: bool) -> bool:
        """Allocate spare blocks for it. Return False if there are none, or preempted rows need them."""
        request = early.request
        if preempted or not self.has_room(request.arrival, running):
            return False
        if self._kv is not None:
            self._kv.take(request, request.arrival.prompt_tokens)
        early.found_tokens = self._prompts.take(request) if self._prompts is not None else 0
        return True

    def evict(self) -> bool:
        """Evict the latest pull. Return False if none holds blocks."""
        for early in reversed(self._all.values()):
            if early.held:
                self.release(early)
                early.held, early.available_ns, early.copied_ns, early.end_ns = False, 0, 0, 0
                return True
        return False

    def release(self, early: EarlyPull | None) -> None:
        """Free its blocks."""
        if early is None or not early.held:
            return
        if self._kv is not None:
            self._kv.end(early.request)
        if self._prompts is not None:
            self._prompts.release(early.request)
