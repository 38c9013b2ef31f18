"""Which of several pools a query goes to: the replicas in turn, those that are slow or crowded passed over.

Pure code: the clock is handed in, so that the simulator can run it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaPolicy:
    """When a pool is passed over, and when it is taken back.

    weight: of a new round trip in the average. A pool is slow once its expected round trip is over `slow` times the
    best one's plus `floor_ns`, and no longer slow once it is under `recovered` times that plus `floor_ns` (hysteresis:
    what lies between changes nothing). A slow pool is sent one query every `probe_ns`; the answer weighs half, so that
    one that has recovered is soon back. With `crowded` queries more than the least loaded one a pool has no turn. One
    that has answered nothing for `stuck_ns`, though it owes answers, is stuck: others are asked what it was asked.
    """

    weight: float = 0.2
    slow: float = 4.0
    recovered: float = 2.0
    floor_ns: int = 5_000_000
    probe_ns: int = 100_000_000
    crowded: int = 32
    stuck_ns: int = 500_000_000


_PROBE_WEIGHT = 0.5


class _Replica:
    __slots__ = ("average_ns", "outstanding", "probed_ns", "slow", "turn", "waiting_ns")

    def __init__(self) -> None:
        self.average_ns: float | None = None  # of its round trips; None before the first
        self.outstanding = 0
        self.waiting_ns = 0  # since when an answer is due: the last one, or the first query after a pause
        self.slow = False
        self.probed_ns = 0
        self.turn = 0

    def expected_ns(self, now_ns: int) -> float | None:
        """The average round trip, or the present silence if that is longer: who is stuck answers nothing."""
        silent = now_ns - self.waiting_ns if self.outstanding else 0
        return float(silent) or None if self.average_ns is None else max(self.average_ns, silent)


class Replicas:
    """What is known of `count` pools: `choose` from those that live; tell what was `sent`, `answered`, `lost`."""

    def __init__(self, count: int, policy: ReplicaPolicy | None = None) -> None:
        self._policy = policy or ReplicaPolicy()
        self._replicas = [_Replica() for _ in range(count)]
        self._turn = 0

    def choose(self, live: Sequence[int], now_ns: int) -> Sequence[int]:
        """All of `live` in the order to try: a slow one due for a probe, the others in turn, the crowded, the slow."""
        if len(live) <= 1:
            return live
        self._judge(live, now_ns)
        least = min(self._replicas[pool].outstanding for pool in live)
        return sorted(live, key=lambda pool: self._rank(self._replicas[pool], least, now_ns))

    def _rank(self, replica: _Replica, least: int, now_ns: int) -> tuple[int, int]:
        if replica.slow:
            due = replica.outstanding == 0 and now_ns - replica.probed_ns >= self._policy.probe_ns
            return (0 if due else 3), replica.turn
        return (2 if replica.outstanding > least + self._policy.crowded else 1), replica.turn

    def _judge(self, live: Sequence[int], now_ns: int) -> None:
        expected = {pool: self._replicas[pool].expected_ns(now_ns) for pool in live}
        known = [value for value in expected.values() if value is not None]
        if not known:
            return
        best = min(known)
        for pool, value in expected.items():
            replica = self._replicas[pool]
            if value is None:
                continue
            limit = best * (self._policy.recovered if replica.slow else self._policy.slow) + self._policy.floor_ns
            if replica.slow != (value > limit):
                replica.slow = not replica.slow
                replica.probed_ns = now_ns

    def sent(self, pool: int, now_ns: int, count: int = 1) -> None:
        """`count` queries went to a pool: the others' turn comes first."""
        replica = self._replicas[pool]
        if replica.outstanding == 0:
            replica.waiting_ns = now_ns
        replica.outstanding += count
        replica.probed_ns = now_ns
        self._turn += 1
        replica.turn = self._turn

    def answered(self, pool: int, took_ns: int | None, now_ns: int) -> None:
        """A query of a pool ended, `took_ns` after it was sent; None if without an answer, which may be had fast."""
        replica = self._replicas[pool]
        replica.outstanding -= 1
        replica.waiting_ns = now_ns
        if took_ns is None:
            return
        if replica.average_ns is None:
            replica.average_ns = float(took_ns)
        else:
            weight = _PROBE_WEIGHT if replica.slow else self._policy.weight
            replica.average_ns += weight * (took_ns - replica.average_ns)

    def lost(self, pool: int) -> None:
        """A pool's session is over: what comes back is another process."""
        turn = self._replicas[pool].turn
        self._replicas[pool] = _Replica()
        self._replicas[pool].turn = turn

    def slow(self, pool: int) -> bool:
        """Whether a pool is passed over for being slow, as `choose` judged last."""
        return self._replicas[pool].slow

    def stuck(self, pool: int, now_ns: int) -> bool:
        """Whether a pool owes answers and has given none for too long."""
        replica = self._replicas[pool]
        return replica.outstanding > 0 and now_ns - replica.waiting_ns >= self._policy.stuck_ns

    def outstanding(self, pool: int) -> int:
        """Queries that a pool has not answered yet."""
        return self._replicas[pool].outstanding
