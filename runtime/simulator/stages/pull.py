"""Copies of KV from prefill into a simulated decode worker."""

from collections.abc import Callable
from dataclasses import dataclass

from runtime.serving.decode.handover_queue import SLICE_NS
from runtime.serving.kv.tiers import BUSY_SHARE
from runtime.simulator.stages.decode_batches import Batch
from runtime.simulator.stages.events import Events
from runtime.simulator.stages.request import SimRequest


@dataclass(slots=True, eq=False)
class Pull:
    """A pull: `left_ns` of copying remain, until `end_ns` once it runs uninterrupted."""

    request: SimRequest
    pulled: Callable[[], None]
    left_ns: int
    end_ns: int = 0


class Link:
    """Time that copies take beside a batch. `slice_ns`: longest slice between two steps; 0: copies run concurrently."""

    def __init__(self, events: Events, batch: Batch, slice_ns: int) -> None:
        self._events, self._batch, self._slice_ns = events, batch, slice_ns

    @property
    def batch_runs(self) -> bool:
        """Whether there is a batch that a copy would delay."""
        return bool(len(self._batch) or self._batch.joining)

    def copy(self, pull: Pull) -> bool:
        """Continue a pull. Return whether it is complete."""
        now = self._events.now_ns
        if pull.end_ns:
            return pull.end_ns <= now
        if self._slice_ns and self.batch_runs:
            copied = min(pull.left_ns, SLICE_NS, self._batch.step_ns() // BUSY_SHARE)
            pull.left_ns -= copied
            self._batch.delay_next_step(copied / 1e9)
            return pull.left_ns == 0
        self.schedule_end(pull, now)
        return pull.end_ns <= now

    def schedule_end(self, pull: Pull, at_ns: int) -> None:
        """Let the rest of a pull run uninterrupted from `at_ns`."""
        pull.end_ns = at_ns + pull.left_ns
        if pull.end_ns > self._events.now_ns:
            self._events.at(pull.end_ns, self._batch.interrupt)
        else:
            self._batch.interrupt()
