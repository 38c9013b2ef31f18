"""What the pool's scheduler is compared with: a FIFO pool and static batches, in the same loop and the same engine."""

from ipc import Request, Stage
from runtime.node.worker import Worker
from runtime.pool.process import Pool
from runtime.pool.scheduler import Round, Scheduler


class FifoScheduler(Scheduler[Request]):
    """One queue, N slots, first come first served; nobody is paused, refused for a deadline's sake, or kept waiting."""

    stretch = 0

    @property
    def width(self) -> int:
        return self._policy.slots

    def next(self, now_ns: int) -> Round[Request]:
        changes = Round[Request]()
        while self._batch.active < self.width and (self._prefill or self._decode):
            self._start(self._older(), changes)
        return changes

    def _older(self) -> Stage:
        if not (self._prefill and self._decode):
            return "prefill" if self._prefill else "decode"
        return "prefill" if self._prefill.front.arrival_ns <= self._decode.front.arrival_ns else "decode"


class StaticScheduler(FifoScheduler):
    """The next batch begins when the last one is done."""

    def next(self, now_ns: int) -> Round[Request]:
        return Round() if self._batch.held else super().next(now_ns)


class StaticPool(Pool):
    """A batch's answers go out together, when its last query is done."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, StaticScheduler)
        self._done: list[int] = []

    def _publish(self, finished: list[int]) -> None:
        self._done += finished
        if not self._engine.active_slots:
            super()._publish(self._done)
            self._done = []


def fifo_pool(worker: Worker) -> Pool:
    return Pool(worker, FifoScheduler)


POOLS = {"trinity": Pool, "fifo": fifo_pool, "static": StaticPool}
