"""Policies for simulation: as configured, with a fixed reserve, or with other rules."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from runtime.errors import ConfigError
from runtime.node.config import NodeConfig
from runtime.node.placement.pool_placement import PAIRED_ROLES
from runtime.pool.settings import RULE_NAMES, Policy, Rules, policy_of

Kind = Rules | Literal["configured", "fixed"]
_KINDS: tuple[Kind, ...] = tuple(name for kinds in get_args(Kind) for name in get_args(kinds))


def pool_device(config: NodeConfig) -> str:
    """Return the device of the pool's first worker."""
    beside = [config.prefill if stage == "prefill" else config.decode for stage in PAIRED_ROLES[config.pool.placement]]
    return (*beside, config.pool)[0].devices[0]


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy. configured: as in the file, with the control law; fixed: with r = `reserve`, without it."""

    kind: Kind
    reserve: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "PolicyChoice":
        """Parse a policy name, or `fixed:r`. Raises `ConfigError`."""
        kind, _, value = text.partition(":")
        if kind == "fixed":
            try:
                reserve = float(value)
            except ValueError:
                reserve = -1.0
            if 0 <= reserve <= 1:
                return cls("fixed", reserve)
            raise ConfigError(f"policy {text!r}: expected fixed:r with r from 0 to 1, such as fixed:0.3")
        for known in _KINDS:
            if text == known:
                return cls(known)
        names = ", ".join("fixed:r" if known == "fixed" else known for known in _KINDS)
        raise ConfigError(f"unknown policy {text!r}; known policies: {names}")

    @property
    def controlled(self) -> bool:
        """Whether the control law adjusts the reserve."""
        return self.kind == "configured"

    def __str__(self) -> str:
        return f"fixed:{self.reserve:g}" if self.kind == "fixed" else self.kind

    def rules(self, config: NodeConfig, slots: int) -> Policy:
        policy = policy_of(config, slots, pool_device(config))
        if self.kind == "fixed":
            policy = replace(policy, reserve=self.reserve)
        elif self.kind in RULE_NAMES:
            policy = replace(policy, rules=self.kind)
        return policy
