"""Exponential restart back-off of a worker."""

import random

HEALTHY_S = 30.0


class Backoff:
    """Restart delays in seconds: none after the first failure, then doubling with jitter up to `most_s`.

    A run of `HEALTHY_S` or longer resets them.
    """

    def __init__(self, source: random.Random, first_s: float = 0.1, most_s: float = 60.0) -> None:
        self._source = source
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def next_delay(self, ran_s: float) -> float:
        """Return the delay after a run of `ran_s` seconds (0 if it never became ready): half to all of the step."""
        if ran_s >= HEALTHY_S:
            self._failures = 0
        self._failures += 1
        if self._failures == 1:
            return 0.0
        step = min(self._most_s, self._first_s * 2.0 ** min(self._failures - 2, 64))
        return step * (0.5 + 0.5 * self._source.random())
