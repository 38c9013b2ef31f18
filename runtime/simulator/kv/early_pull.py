"""Early pulls: prompts whose KV a simulated decode worker copies while prefill computes them (`decode.handover_queue`).

A prompt that was announced before has a slot and blocks, and keeps them. Any other prompt has spare blocks only, and
loses them to a complete prompt or to a row; it is then copied from the start.
"""

from dataclasses import dataclass

from runtime.simulator.kv.prompt_blocks import PromptBlocks
from runtime.simulator.kv.rows import KvRows
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.traces import Arrival


@dataclass(slots=True, eq=False)
class EarlyPull:
    """Of its KV `copied_ns` of copying are done, or under way until `end_ns`, of `there_ns` that prefill has; it is
    heard of from `ready_ns` on. With blocks (`held`), `found_tokens` of it were here before."""

    request: SimRequest
    ready_ns: int
    reserved: bool = False
    held: bool = False
    found_tokens: int = 0
    there_ns: int = 0
    copied_ns: int = 0
    end_ns: int = 0


class EarlyPulls:
    """Those of one worker, the first one first; blocks where they are counted."""

    def __init__(self, kv: KvRows | None, prompts: PromptBlocks | None) -> None:
        self._kv, self._prompts = kv, prompts
        self._all: dict[SimRequest, EarlyPull] = {}

    def __len__(self) -> int:
        return len(self._all)

    def of(self, request: SimRequest, ready_ns: int) -> EarlyPull:
        """A prompt of which something is computed; new ones are heard of at `ready_ns`."""
        return self._all.setdefault(request, EarlyPull(request, ready_ns))

    def reserve(self, request: SimRequest, found_tokens: int, now_ns: int) -> None:
        """A prompt that was announced has a slot and blocks."""
        self._all[request] = EarlyPull(request, now_ns, True, True, found_tokens)

    def first(self, now_ns: int) -> EarlyPull | None:
        """The first of which there is more to copy, now."""
        for early in self._all.values():
            if early.held and early.there_ns > early.copied_ns and max(early.ready_ns, early.end_ns) <= now_ns:
                return early
        return None

    def get(self, request: SimRequest) -> EarlyPull | None:
        return self._all.get(request)

    def pop(self, request: SimRequest) -> EarlyPull | None:
        """It is whole, or over."""
        return self._all.pop(request, None)

    # ---- blocks

    def has_room(self, arrival: Arrival, running: int) -> bool:
        """Whether there are blocks for a prompt, beside one for each running row."""
        if self._kv is not None and not self._kv.has_room(arrival.prompt_tokens, running):
            return False
        return self._prompts is None or self._prompts.has_room(arrival)

    def take(self, early: EarlyPull, running: int, *, out: bool) -> bool:
        """Have blocks for it, if nobody wants them: rows that are `out` do."""
        request = early.request
        if out or not self.has_room(request.arrival, running):
            return False
        if self._kv is not None:
            self._kv.take(request, request.arrival.prompt_tokens)
        early.found_tokens = self._prompts.take(request) if self._prompts is not None else 0
        return True

    def give_up(self) -> bool:
        """The latest that is not reserved loses its blocks; False if none has any."""
        for early in reversed(self._all.values()):
            if early.held and not early.reserved:
                self.release(early)
                early.held, early.there_ns, early.copied_ns, early.end_ns = False, 0, 0, 0
                return True
        return False

    def release(self, early: EarlyPull | None) -> None:
        """Its blocks are free."""
        if early is None or not early.held:
            return
        if self._kv is not None:
            self._kv.end(early.request)
        if self._prompts is not None:
            self._prompts.release(early.request)
