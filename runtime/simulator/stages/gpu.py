"""A GPU that a model and a vector pool may share, with mutual slowdown."""

from runtime.simulator.stages.pool_tables import Share


class Gpu:
    """While the model is busy, an extend takes `slowdown` times as long, and its unshared time is added to the model's
    next pass (time slicing). With one tenant (`slowdown` 1) there is no cost.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.share = Share()  # with compiled code of the pool
        self._model_busy = False

    @property
    def model_busy(self) -> bool:
        return self._model_busy

    @model_busy.setter
    def model_busy(self, busy: bool) -> None:
        self._model_busy = busy
        if self.slowdown > 1.0:
            self.share.model_busy = busy

    def take_debt_ns(self) -> int:
        """Return, and reset, the time that concurrent extends add to the model's next pass."""
        if self.slowdown == 1.0:
            return 0
        debt, self.share.debt_ns = self.share.debt_ns, 0
        return debt
