"""A GPU that a model and a vector pool may share: each slows the other down, and no work is for nothing."""


class Gpu:
    """While the model is at work an extend takes `slowdown` times as long, and its time alone is added to the model's
    next pass: the two take turns. A GPU with one tenant costs nothing beside.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown
        self.model_busy = False
        self._debt_ns = 0

    @property
    def pace(self) -> float:
        """How many times as long as alone an extend takes now."""
        return self._slowdown if self.model_busy else 1.0

    def owe(self, alone_ns: int) -> None:
        """Extends of so long have run beside the model."""
        self._debt_ns += alone_ns

    def take_debt_ns(self) -> int:
        """What the model's next pass takes longer, because of extends beside the last one."""
        debt, self._debt_ns = self._debt_ns, 0
        return debt
