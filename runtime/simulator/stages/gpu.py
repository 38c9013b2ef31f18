"""A GPU that a model and a vector pool may share: each slows the other down, and no work is for nothing."""

import numpy as np

from runtime.simulator.stages.pool_core import DEBT_NS, MODEL_BUSY


class Gpu:
    """While the model is at work an extend takes `slowdown` times as long, and its time alone is added to the model's
    next pass: the two take turns. A GPU with one tenant costs nothing beside.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.words = np.zeros(2, np.int64)  # what the pool sees and adds to
        self._model_busy = False

    @property
    def model_busy(self) -> bool:
        return self._model_busy

    @model_busy.setter
    def model_busy(self, busy: bool) -> None:
        self._model_busy = busy
        if self.slowdown > 1.0:
            self.words[MODEL_BUSY] = busy

    def take_debt_ns(self) -> int:
        """What the model's next pass takes longer, because of extends beside the last one."""
        if self.slowdown == 1.0:
            return 0
        debt, self.words[DEBT_NS] = int(self.words[DEBT_NS]), 0
        return debt
