"""What the scheduler learns as it goes: how many extends a query takes, and how long an extend takes.

Both are fed by whoever runs the scheduler, with its own clock: the pool with what it measured, a simulator with what it
was calibrated to.
"""

from typing import NamedTuple

_MAX_KINDS = 1024  # clients choose parameters freely; what is learnt of them is bounded
_MEMORY = 64  # queries after which an old one counts for 1/e
_ROUNDS = 256  # the same of rounds
_INERTIA = 16.0  # slots², how much spread it takes to change what is fixed in proportion to what is not
_OUTLIER = 4.0  # a round that took longer than this many times what was expected counts as that long


class Kind(NamedTuple):
    """Queries that take about as many extends as each other."""

    collection: str
    top_m: int
    search_width: int
    patience: int | None = None


class ExtendEstimate:
    """Ê: how many extends a query of a kind takes, a running mean over those that finished."""

    def __init__(self) -> None:
        self._means: dict[Kind, tuple[float, int]] = {}

    def of(self, kind: Kind) -> float:
        """A kind not seen yet is assumed to follow CAGRA's rule: every entry of top_m is expanded, and a few more."""
        known = self._means.get(kind)
        return known[0] if known else kind.top_m / kind.search_width + 3.0

    def learn(self, kind: Kind, extends: int) -> None:
        mean, count = self._means.get(kind, (0.0, 0))
        if not count and len(self._means) >= _MAX_KINDS:
            self._means.clear()
        count = min(count + 1, _MEMORY)
        self._means[kind] = (mean + (extends - mean) / count, count)


class ExtendCost:
    """T_ext(a): how long an extend with `a` active slots takes, as a line `fixed + each·a` in ns.

    Least squares over the last few hundred rounds, older ones forgotten exponentially. On a GPU `each` is about 0 until
    it saturates, on a CPU it is nearly everything. Before the first round all is 0, and only slots count.
    """

    def __init__(self) -> None:
        self._count = 0
        self._a = self._t = self._aa = self._at = 0.0
        self.fixed_ns = self.each_ns = 0.0

    def learn(self, active: float, extend_ns: float) -> None:
        """An extend of `active` slots (of several, their mean) took `extend_ns`."""
        expected = self.of(active)
        if self._count > 8 and expected > 0.0:
            extend_ns = min(extend_ns, _OUTLIER * expected)  # the process lost its core for a while
        self._count = min(self._count + 1, _ROUNDS)
        weight = 1.0 / self._count
        self._a += (active - self._a) * weight
        self._t += (extend_ns - self._t) * weight
        self._aa += (active * active - self._aa) * weight
        self._at += (active * extend_ns - self._at) * weight
        spread = self._aa - self._a * self._a
        # The less the numbers of active slots differed, the more the line keeps its shape: what has changed then is how
        # fast the machine is.
        shaped = self.each_ns * self._t / self.of(self._a) if self.each_ns else 0.0
        self.each_ns = (self._at - self._a * self._t + _INERTIA * shaped) / (spread + _INERTIA)
        self.each_ns = min(max(self.each_ns, 0.0), self._t / self._a)
        self.fixed_ns = self._t - self.each_ns * self._a

    def of(self, active: float) -> float:
        """Expected ns of an extend with `active` slots."""
        return self.fixed_ns + self.each_ns * active

    def most_within(self, extend_ns: float, limit: int) -> int:
        """The most active slots, up to `limit`, with which an extend takes no longer than `extend_ns`."""
        room = extend_ns - self.fixed_ns
        if room <= 0.0:
            return 0
        return limit if self.each_ns * limit <= room else int(room / self.each_ns)

    def worthwhile(self, limit: int, waste: float) -> int:
        """The fewest active slots, 1..limit, of whose extend the fixed part is no more than `waste` of the rest.

        More would hardly raise queries per second, and make each of them slower.
        """
        if self.each_ns * waste * limit <= self.fixed_ns or self.each_ns == 0.0:
            return limit
        return max(1, -int(-self.fixed_ns // (self.each_ns * waste)))
