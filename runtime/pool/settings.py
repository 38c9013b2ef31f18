"""The pool's policy as it is configured."""

from dataclasses import dataclass

from gpu.slots import MAX_SLOTS
from runtime.node.config import NodeConfig

RULE_NAMES = ("trinity", "paper", "fifo", "static")


@dataclass(frozen=True, slots=True)
class Policy:
    """What the policy is told once. (`reserve` and the flush timeouts are first values: they may change.)

    slots: N, the most queries that are active at a time. engine_slots: those and the paused ones. queue: queries that
    may wait. reserve: r in [0, 1]. prefill_target_ns: L_pre,max. aging_ns: when decode queries wait and none was
    active for this long, the oldest is. flush_prefill_ns, flush_ns: τ_pre and τ. max_pauses: of one decode query.
    rules: "trinity", "paper", "fifo" or "static".
    """

    slots: int
    engine_slots: int = 0
    queue: int = 4096
    reserve: float = 0.3
    prefill_target_ns: int = 1 << 60
    aging_ns: int = 50_000_000
    flush_prefill_ns: int = 0
    flush_ns: int = 0
    max_pauses: int = 64
    rules: str = "trinity"

    @property
    def decode_queue(self) -> int:
        """Decode queries that may wait: the rest of the queue is kept for prefill."""
        return self.queue - self.queue // 4


def policy_of(config: NodeConfig, slots: int) -> Policy:
    """The pool's policy, as configured, with so many slots."""
    limits = config.pool
    return Policy(
        slots=slots,
        engine_slots=min(2 * slots, MAX_SLOTS),
        queue=limits.queue,
        reserve=limits.reserve,
        prefill_target_ns=int(limits.prefill_target(config.slo) * 1e9),
        aging_ns=int(limits.aging_s * 1e9),
        flush_prefill_ns=int(limits.flush_prefill_s * 1e9),
        flush_ns=int(limits.flush_s * 1e9),
        max_pauses=limits.max_pauses,
        rules=limits.policy,
    )
