"""A probe trigger of one's own: an answer queries the pool again when the model hesitates between two tokens.

pip install docs/examples/trigger        # beside trinity, then restart the node
curl ... -d '{..., "retrieval": {"every_tokens": 8, "probe_trigger": "margin", "probe_threshold": 0.5}}'
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from runtime.retrieval.passages import Passage


@dataclass(frozen=True)
class MarginTrigger:
    """Probes when the likeliest token leads the next one by less than `threshold` (difference of logits), at the
    earliest `tokens` tokens after the last probe."""

    needs_logits: ClassVar[bool] = True
    default_threshold: ClassVar[float] = 1.0
    tokens: int
    threshold: float

    def should_probe(self, generated: int, last_probe_at: int, scores: npt.ArrayLike | None) -> bool:
        if generated - last_probe_at < self.tokens or scores is None:
            return False
        second, first = np.partition(np.asarray(scores, np.float32), -2)[-2:]
        return bool(first - second < self.threshold)

    def accepts(self, found: Sequence[Passage], used: Container[str]) -> bool:
        return any(passage.id not in used for passage in found)
