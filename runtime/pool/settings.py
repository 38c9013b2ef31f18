"""The pool's policy as it is configured."""

from dataclasses import dataclass
from typing import get_args

from runtime.node.config import NodeConfig, PoolPolicy, PoolSection, SloSection

RULE_NAMES: tuple[PoolPolicy, ...] = get_args(PoolPolicy)
_SHIPPED = PoolSection()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the policy is told once. (`reserve` and the flush timeouts are first values: they may change.)

    slots: N, the most queries that are active at a time. engine_slots: those and the paused ones; 0: twice as many, if
    an engine can have them. queue: queries that may wait. reserve: r in [0, 1]. prefill_target_ns: L_pre,max. aging_ns:
    when decode queries wait and none was active for this long, the oldest is. flush_prefill_ns, flush_ns: τ_pre and τ.
    max_pauses: of one decode query. missed_ns: after which wait a prefill query's request has missed its TTFT.
    The defaults are the configuration's.
    """

    slots: int
    engine_slots: int = 0
    queue: int = _SHIPPED.queue
    reserve: float = _SHIPPED.reserve
    prefill_target_ns: int = _ns(_SHIPPED.prefill_target(SloSection()))
    aging_ns: int = _ns(_SHIPPED.aging_s)
    flush_prefill_ns: int = _ns(_SHIPPED.flush_prefill_s)
    flush_ns: int = _ns(_SHIPPED.flush_s)
    max_pauses: int = _SHIPPED.max_pauses
    missed_ns: int = _ns(SloSection().prefill_wait_s)
    rules: PoolPolicy = _SHIPPED.policy

    @property
    def decode_queue(self) -> int:
        """Decode queries that may wait: the rest of the queue is kept for prefill."""
        return self.queue - self.queue // 4


def policy_of(config: NodeConfig, slots: int) -> Policy:
    """The pool's policy, as configured, with so many slots."""
    limits = config.pool
    return Policy(
        slots=slots,
        queue=limits.queue,
        reserve=limits.reserve,
        prefill_target_ns=_ns(limits.prefill_target(config.slo)),
        aging_ns=_ns(limits.aging_s),
        flush_prefill_ns=_ns(limits.flush_prefill_s),
        flush_ns=_ns(limits.flush_s),
        max_pauses=limits.max_pauses,
        missed_ns=_ns(config.slo.prefill_wait_s),
        rules=limits.policy,
    )
