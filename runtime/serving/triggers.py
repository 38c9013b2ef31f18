"""Probe triggers: when an answer queries the pool again, and whether it inserts the passages found. One per row.

A trigger is evaluated twice: with every new token (`should_probe`), and with the result of the probe (`accepts`). It is
stateless, so an answer that continues on another worker probes at the same tokens.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from runtime.retrieval.passages import Passage
from runtime.serving.messages import Retrieval


class Trigger(Protocol):
    """When a row probes. `needs_logits`: whether `should_probe` reads the logits."""

    needs_logits: ClassVar[bool]

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """Return whether to probe now. The row has `generated` tokens and last probed after `last_probe_at` (0: never).

        `scores`: the logits, float32 [vocabulary], that the last token was sampled from; None if they are unknown.
        """
        ...

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """Return whether to insert the passages found (nearest first); `used` are the ids of those in the context."""
        ...


@dataclass(frozen=True, slots=True)
class PeriodicTrigger:
    """Probes every `tokens` tokens."""

    needs_logits: ClassVar[bool] = False
    tokens: int

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """See `Trigger`."""
        return generated % self.tokens == 0

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """See `Trigger`."""
        return True


@dataclass(frozen=True, slots=True)
class DriftTrigger(PeriodicTrigger):
    """Probes every `tokens` tokens, and inserts nothing while a passage in use is within `distance` of the last words.

    The pool computes the distance in the search. A passage in use that is not among those found is farther away than
    as many others.
    """

    distance: float

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """See `Trigger`."""
        return not any(passage.id in used and passage.distance <= self.distance for passage in found)


@dataclass(frozen=True, slots=True)
class EntropyTrigger(PeriodicTrigger):
    """Probes when the entropy of the next token's distribution exceeds `nats`, at most once in `tokens` tokens."""

    needs_logits: ClassVar[bool] = True
    nats: float

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """See `Trigger`."""
        return generated - last_probe_at >= self.tokens and scores is not None and entropy(scores) > self.nats


def trigger_of(retrieval: Retrieval | None) -> Trigger | None:
    """Return the trigger of a request; None without probes."""
    if retrieval is None or not retrieval.every_tokens:
        return None
    match retrieval.trigger:
        case "every":
            return PeriodicTrigger(retrieval.every_tokens)
        case "drift":
            return DriftTrigger(retrieval.every_tokens, retrieval.threshold)
        case "unsure":
            return EntropyTrigger(retrieval.every_tokens, retrieval.threshold)


def entropy(scores: npt.ArrayLike) -> float:
    """Return the entropy of softmax(scores), in nats; entries of -inf contribute nothing."""
    row = np.asarray(scores, dtype=np.float32)
    below = row - row.max()
    weights = np.exp(below)
    total = float(weights.sum(dtype=np.float64))
    mean = float(np.dot(weights, np.maximum(below, -1e4))) / total
    return float(np.log(total)) - mean
