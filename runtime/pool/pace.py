"""How long extends follow each other before the pool's loop looks around.

A look costs as much as several extends: most of it goes into fetching the loop's code and data back into caches which
extends have filled with vectors. So while queries crowd, a round is long, and answers that came up in it go out
together at its end; while nothing waits it is longer still, but ends as soon as a query finishes or something arrives.
"""

from collections.abc import Iterable
from typing import Protocol

from ipc import Stage

NEWS_NS = 30_000  # how often a round without anyone waiting asks whether something came
_QUIET_NS = 1_000_000
_WAITING_NS = 300_000
_CROWDED_NS = 500_000


class Queues(Protocol):
    """What the pace depends on; a `Scheduler` is one."""

    @property
    def held_back(self) -> bool:
        """Whether a query waits for its place, or is paused."""

    @property
    def crowded(self) -> bool:
        """Whether so many wait or are paused that throughput counts more than the next answer."""


def round_ns(scheduler: Queues) -> int:
    """How long this round's extends may follow each other, at most."""
    if scheduler.crowded:
        return _CROWDED_NS
    return _WAITING_NS if scheduler.held_back else _QUIET_NS


def ends_round(scheduler: Queues, finished: Iterable[Stage]) -> bool:
    """Whether the round is over because queries of these stages have finished."""
    stages = set(finished)
    return bool(stages) and not (scheduler.crowded and stages == {"decode"})
