"""When an answer asks the pool again, and whether it takes in what was found. Pure; one for each row.

A trigger is asked twice: with every new token whether to probe, and, when the probe has its answer, whether the
passages go in. All that it knows is handed in, so that an answer that goes on elsewhere asks where it would have asked.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from runtime.retrieval.passages import Passage
from runtime.serving.messages import Retrieval


class Trigger(Protocol):
    """When a row asks. `needs_logits`: whether `asks` looks at the logits."""

    needs_logits: ClassVar[bool]

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """Return whether to probe now. The row has `generated` tokens and last probed after `last_probe_at` (0: never).

        `scores`: the logits, float32 [vocabulary], that the last token was sampled from; None if they are unknown.
        """
        ...

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """Whether what was found, nearest first, goes in, beside the passages in use (their ids)."""
        ...


@dataclass(frozen=True, slots=True)
class PeriodicTrigger:
    """Each `tokens` tokens."""

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
    """The same, but nothing goes in as long as a passage in use is within `distance` of the text's last words.

    Their distance is the pool's: the search has compared them with all passages there are. One in use that is not among
    those found is farther away than as many others.
    """

    distance: float

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        """See `Trigger`."""
        return not any(passage.id in used and passage.distance <= self.distance for passage in found)


@dataclass(frozen=True, slots=True)
class EntropyTrigger(PeriodicTrigger):
    """`tokens` tokens after the last time at the earliest, once the model hesitates between tokens by over `nats`."""

    needs_logits: ClassVar[bool] = True
    nats: float

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        """See `Trigger`."""
        return generated - last_probe_at >= self.tokens and scores is not None and entropy(scores) > self.nats


def trigger_of(retrieval: Retrieval | None) -> Trigger | None:
    """As a request has it; None without probes."""
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
    """Of the distribution that logits stand for, in nats; those of -inf have no part in it."""
    row = np.asarray(scores, dtype=np.float32)
    below = row - row.max()
    weights = np.exp(below)
    total = float(weights.sum(dtype=np.float64))
    mean = float(np.dot(weights, np.maximum(below, -1e4))) / total
    return float(np.log(total)) - mean
