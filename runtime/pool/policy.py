"""The scheduler's settings."""

from dataclasses import dataclass

_MS = 1_000_000
CROWD = 3  # queries that wait or are paused, from which on throughput counts for more than the next answer


@dataclass(frozen=True, slots=True)
class Policy:
    """What the scheduler is told once. (`reserve` and `flush_prefill_ns` are its first values: both may change.)

    slots: N, the most queries that are active at a time.
    spare: engine slots beyond N, in which prefill queries run while paused decode queries keep theirs.
    queue: queries that may wait.
    reserve: r in [0, 1]; ⌈rN⌉ slots are owed to prefill queries.
    prefill_target_ns: L_pre,max, within which a prefill query ought to be answered (never later than its deadline).
    aging_ns: a decode query that is older than this goes before younger prefill queries, beyond the reserve.
    flush_prefill_ns, flush_ns: τ_pre and τ, how long a query may wait for company while nothing runs.
    max_pauses: how often a decode query may be paused.
    decode_stall_ns: when decode queries wait and none has run for this long, the oldest one runs, whatever else waits.
    waste: the fixed part of an extend that is put up with, as a share of the rest; so many slots are worth while.
    """

    slots: int
    spare: int = 0
    queue: int = 4096
    reserve: float = 0.3
    prefill_target_ns: int = 1 << 61
    aging_ns: int = 0
    flush_prefill_ns: int = 0
    flush_ns: int = 0
    max_pauses: int = 16
    decode_stall_ns: int = 50 * _MS
    waste: float = 0.03

    @property
    def engine_slots(self) -> int:
        """Slots that the engine needs: for active and paused queries together."""
        return self.slots + self.spare

    @property
    def decode_queue(self) -> int:
        """Decode queries that may wait: the rest of the queue is kept for prefill."""
        return self.queue - self.queue // 4
