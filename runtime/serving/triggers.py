"""Probe triggers: when an answer queries the pool again, and whether it inserts the passages found. One per row.

A trigger is evaluated twice: with every new token (`should_probe`), and with the result of the probe (`accepts`). It is
stateless, so an answer that continues on another worker probes at the same tokens. Besides the three built-in ones
there are those of installed packages: a class with the attributes of `Trigger` and arguments `(tokens, threshold)`, as
an entry point of the group `trinity.triggers` (docs/examples/trigger).
"""

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from runtime.errors import InvalidRequest
from runtime.node.retrieval_config import TRIGGERS, installed_triggers
from runtime.retrieval.passages import Passage
from runtime.serving.messages import ProbeOutcome, Retrieval

_log = logging.getLogger("trinity.triggers")

PROBE_TIMEOUT_S = 2.0  # of a probe, after which its answer continues without passages


class Trigger(Protocol):
    """When a row probes. `needs_logits`: whether `should_probe` reads the logits."""

    @property
    def needs_logits(self) -> bool: ...

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """Return whether to probe now. The row has `generated` tokens and last probed after `last_probe_at` (0: never).

        `scores`: the logits, float32 [vocabulary], that the last token was sampled from; None if they are unknown.
        """
        ...

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """Return whether to insert the passages found (nearest first); `used` are the ids of those in the context."""
        ...


class TriggerType(Protocol):
    """Class of a trigger. `default_threshold`: that of requests without one; None: the trigger has no threshold."""

    needs_logits: bool
    default_threshold: float | None

    def __call__(self, tokens: int, threshold: float) -> Trigger: ...


@dataclass(frozen=True, slots=True)
class PeriodicTrigger:
    """Probes every `tokens` tokens."""

    needs_logits: ClassVar[bool] = False
    default_threshold: ClassVar[float | None] = None
    tokens: int
    threshold: float = 0.0

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """See `Trigger`."""
        return generated % self.tokens == 0

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """See `Trigger`."""
        return True


@dataclass(frozen=True, slots=True)
class DriftTrigger(PeriodicTrigger):
    """Probes every `tokens` tokens, and inserts nothing while a passage in use is within `threshold` of the last words.

    The pool computes the distance in the search. A passage in use that is not among those found is farther away than
    as many others.
    """

    default_threshold: ClassVar[float | None] = 0.5

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """See `Trigger`."""
        return not any(passage.id in used and passage.distance <= self.threshold for passage in found)


@dataclass(frozen=True, slots=True)
class EntropyTrigger(PeriodicTrigger):
    """Probes when the entropy of the next token's distribution exceeds `threshold` nats, at most once in `tokens`
    tokens."""

    needs_logits: ClassVar[bool] = True
    default_threshold: ClassVar[float | None] = 2.0

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """See `Trigger`."""
        return generated - last_probe_at >= self.tokens and scores is not None and entropy(scores) > self.threshold


class InstalledTrigger:
    """A trigger of an installed package: its errors, of loading and making it too, are logged and end the probes of an
    answer, not the answer or the worker."""

    def __init__(self, name: str, tokens: int, threshold: float) -> None:
        self._name = name
        self._trigger: Trigger | None = None
        self.needs_logits = False
        try:
            self._trigger = make_trigger(name, tokens, threshold)
            self.needs_logits = self._trigger.needs_logits
        except InvalidRequest:
            self._fail()

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """See `Trigger`."""
        return self._ask(lambda trigger: trigger.should_probe(generated, last_probe_at, scores))

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """See `Trigger`."""
        return self._ask(lambda trigger: trigger.accepts(found, used))

    def _ask(self, question: Callable[[Trigger], bool]) -> bool:
        if self._trigger is None:
            return False
        try:
            return bool(question(self._trigger))
        except Exception:
            self._fail()
            return False

    def _fail(self) -> None:
        self._trigger = None
        _log.exception("the trigger %r failed: its answer does not probe any more", self._name)


_BUILT_IN: dict[str, type[PeriodicTrigger]] = dict(
    zip(TRIGGERS, (PeriodicTrigger, DriftTrigger, EntropyTrigger), strict=True)
)


def trigger_type(name: str) -> TriggerType:
    """Return the class of the trigger `name`. Raises InvalidRequest if there is none, or it cannot be loaded."""
    if (built_in := _BUILT_IN.get(name)) is not None:
        return built_in
    if (entry := installed_triggers().get(name)) is None:
        known = ", ".join((*TRIGGERS, *sorted(installed_triggers())))
        raise InvalidRequest(f"probe_trigger {name[:64]!r} is not known; there are {known}", "retrieval.probe_trigger")
    return _load(entry)


@cache
def _load(entry: EntryPoint) -> TriggerType:
    try:
        loaded: TriggerType = entry.load()
        float(loaded.default_threshold or 0)
        if not isinstance(loaded.needs_logits, bool):
            raise TypeError(f"needs_logits is {loaded.needs_logits!r}, not a bool")
    except Exception as error:
        raise InvalidRequest(
            f"probe_trigger {entry.name!r} ({entry.value}) cannot be used: {type(error).__name__}: {error}",
            "retrieval.probe_trigger",
        ) from error
    return loaded


def make_trigger(name: str, tokens: int, threshold: float) -> Trigger:
    """Return a trigger. Raises InvalidRequest as `trigger_type`, and if its class refuses these values."""
    kind = trigger_type(name)
    try:
        return kind(tokens, threshold)
    except Exception as error:
        raise InvalidRequest(
            f"probe_trigger {name!r} refuses every_tokens = {tokens} with probe_threshold = {threshold:g}: "
            f"{type(error).__name__}: {error}",
            "retrieval.probe_threshold",
        ) from error


def counts_tokens(name: str) -> bool:
    """Return whether the trigger probes every so many tokens, whatever they are; then any engine can use it."""
    return getattr(trigger_type(name), "should_probe", None) is PeriodicTrigger.should_probe


def trigger_of(retrieval: Retrieval | None) -> Trigger | None:
    """Return the trigger of a request; None without probes."""
    if retrieval is None or not retrieval.every_tokens:
        return None
    make = make_trigger if retrieval.trigger in _BUILT_IN else InstalledTrigger
    return make(retrieval.trigger, retrieval.every_tokens, retrieval.threshold)


def new_passages(
    trigger: Trigger, found: Sequence[Passage], used: Container[str]
) -> tuple[ProbeOutcome, list[Passage]]:
    """Return a probe's outcome, and the passages found that the context lacks, if the trigger accepts them."""
    if not trigger.accepts(found, used):
        return "near", []
    return "answered", [passage for passage in found if passage.id not in used]


def entropy(scores: npt.ArrayLike) -> float:
    """Return the entropy of softmax(scores), in nats; entries of -inf contribute nothing."""
    row = np.asarray(scores, dtype=np.float32)
    below = row - row.max()
    weights = np.exp(below)
    total = float(weights.sum(dtype=np.float64))
    mean = float(np.dot(weights, np.maximum(below, -1e4))) / total
    return float(np.log(total)) - mean
