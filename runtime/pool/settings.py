"""Settings of the pool's scheduling policy, derived from the configuration."""

from dataclasses import dataclass
from typing import Literal, get_args

from runtime.node.config import NodeConfig, SloSection
from runtime.node.worker_config import PoolSection

Rules = Literal["trinity", "paper"]
RULE_NAMES: tuple[Rules, ...] = get_args(Rules)
"""Ordered by their numbers in `tables.py`."""
_DEFAULTS = PoolSection()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the scheduling policy. `reserve` and `flush_prefill_ns` are initial values that may change.

    slots: N, the maximum of active queries. engine_slots: maximum of active and paused queries; 0: twice as many as
    slots, up to the engine's limit. queue: maximum of waiting queries. reserve: r in [0, 1]. prefill_target_ns:
    L_pre,max. aging_ns: longest time without an active decode query while one waits. flush_prefill_ns: τ_pre.
    missed_ns: wait after which a prefill query's request misses its TTFT.
    keep_reserve: while prefill is present, decode leaves its ⌈rN⌉ slots free, used or not: on GPUs, where active
    queries share the memory's bandwidth. The defaults are the configuration's.
    """

    slots: int
    engine_slots: int = 0
    queue: int = 4096
    reserve: float = _DEFAULTS.reserve
    prefill_target_ns: int = _ns(SloSection().prefill_target_s)
    aging_ns: int = 50_000_000
    flush_prefill_ns: int = 0
    missed_ns: int = _ns(SloSection().prefill_wait_s)
    keep_reserve: bool = False
    rules: Rules = "trinity"

    @property
    def decode_queue(self) -> int:
        """Maximum of waiting decode queries: the rest of the queue is reserved for prefill."""
        return self.queue - self.queue // 4


def policy_of(config: NodeConfig, slots: int, device: str = "cpu") -> Policy:
    """Return the policy's settings for a configuration, a number of slots and the pool's device."""
    limits = config.pool
    return Policy(
        slots=slots,
        reserve=limits.reserve,
        prefill_target_ns=_ns(config.slo.prefill_target_s),
        missed_ns=_ns(config.slo.prefill_wait_s),
        keep_reserve=device != "cpu",
    )
