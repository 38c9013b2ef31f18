"""Whether to look at a ring before sleeping: yes if the last waits were short, hardly if they were long."""

_LOOK_NS = 2_000
_LONG_WAITS = 2


class SpinBudget:
    """How long the next wait may spin: `limit_ns`, but only a token look after two waits in a row that took longer.

    So an idle process does not burn its core, and a busy one does not fall asleep over a reply that is late for once:
    being woken takes longer than most waits of a busy phase (a budget of twice the usual wait was tried and lost).
    """

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._long_waits = 0
        self.ns = limit_ns

    def learn(self, waited_ns: int) -> None:
        """A wait that had to sleep took `waited_ns` in all. (One that ended while spinning changes nothing.)"""
        self._long_waits = self._long_waits + 1 if waited_ns > self._limit_ns else 0
        self.ns = min(_LOOK_NS, self._limit_ns) if self._long_waits >= _LONG_WAITS else self._limit_ns
