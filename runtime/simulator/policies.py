"""The policies to try: production's scheduler with the control loop or a fixed reserve, and the naive ones."""

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from runtime.errors import ConfigError
from runtime.node.config import PoolSection
from runtime.pool.process import policy_of
from runtime.pool.scheduler import Scheduler
from runtime.simulator.naive import NaiveScheduler, Order, PoolScheduler
from runtime.simulator.pool import Search

Kind = Literal["adaptive", "fixed", "fifo", "prefill-first", "decode-first"]


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """`reserve` is r of a fixed one."""

    kind: Kind
    reserve: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "PolicyChoice":
        """From `adaptive`, `fixed:r`, `fifo`, `prefill-first` or `decode-first`. Raises `ConfigError`."""
        kind, _, value = text.partition(":")
        if kind == "fixed":
            try:
                reserve = float(value)
            except ValueError:
                reserve = -1.0
            if 0 <= reserve <= 1:
                return cls("fixed", reserve)
            raise ConfigError(f"policy {text!r}: give fixed:r with r from 0 to 1, such as fixed:0.3")
        for known in get_args(Kind):
            if text == known:
                return cls(known)
        raise ConfigError(f"policy {text!r}: known are adaptive, fixed:r, fifo, prefill-first and decode-first")

    def __str__(self) -> str:
        return f"fixed:{self.reserve:g}" if self.kind == "fixed" else self.kind

    def scheduler(self, pool: PoolSection) -> PoolScheduler[Search]:
        """A new scheduler of one pool."""
        orders: dict[Kind, Order] = {"fifo": "fifo", "prefill-first": "prefill-first", "decode-first": "decode-first"}
        if (order := orders.get(self.kind)) is not None:
            return NaiveScheduler(order, pool.slots, pool.queue)
        if self.kind == "fixed":
            pool = msgspec.structs.replace(pool, reserve=self.reserve)
        return Scheduler(policy_of(pool))
