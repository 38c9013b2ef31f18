"""Whether to look at a ring before sleeping: yes if the last waits were short, hardly if they were long."""

import numpy as np

from ipc.memory.compiled import compiled
from ipc.memory.instructions import words

_LOOK_NS = 2_000
_LONG_WAITS = 2
(_LIMIT_NS, _LONG, _NOW_NS) = range(3)  # words of a budget: the most, long waits in a row, what the next wait may spin


@compiled
def spin_ns(budget: int) -> int:
    """How long the next wait may spin, by the budget at this address."""
    return words(budget, 3)[_NOW_NS]  # type: ignore[no-any-return]


@compiled
def learn_wait(budget: int, waited_ns: int) -> None:
    """See `SpinBudget.learn`; for compiled code, which has the budget's address."""
    own = words(budget, 3)
    own[_LONG] = own[_LONG] + 1 if waited_ns > own[_LIMIT_NS] else 0
    own[_NOW_NS] = min(_LOOK_NS, own[_LIMIT_NS]) if own[_LONG] >= _LONG_WAITS else own[_LIMIT_NS]


class SpinBudget:
    """How long the next wait may spin: `limit_ns`, but only a token look after two waits in a row that took longer.

    So an idle process does not burn its core, and a busy one does not fall asleep over a reply that is late for once:
    being woken takes longer than most waits of a busy phase (a budget of twice the usual wait was tried and lost).
    """

    def __init__(self, limit_ns: int) -> None:
        budget = np.array([limit_ns, 0, limit_ns], np.int64)
        self._words = budget.data
        self.address = int(budget.ctypes.data)

    @property
    def ns(self) -> int:
        return int(self._words[_NOW_NS])

    def learn(self, waited_ns: int) -> None:
        """A wait that had to sleep took `waited_ns` in all. (One that ended while spinning changes nothing.)"""
        learn_wait(self.address, waited_ns)
