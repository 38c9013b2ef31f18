"""The order in which the workers of a node stop."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from runtime.node.config import Role
from runtime.node.metrics.table import NODE_STOPS, State
from runtime.node.supervisor.lifecycle import Lifecycle
from runtime.node.supervisor.supervised_worker import Phase, SupervisedWorker

_ORDER: tuple[Role, ...] = ("frontend", "engine", "prefill", "decode", "pool")  # clients stop before their servers


def stop_steps(
    workers: Sequence[SupervisedWorker], lifecycle: Lifecycle, by: float
) -> Iterator[tuple[Sequence[SupervisedWorker], Callable[[], bool]]]:
    """Begin one step of a node's stop after the other; yield its workers, and whether it still waits for them.

    HTTP workers close the port first, since they need the frontend: once /health has failed for as long as its watchers
    need to notice. Then the frontend finishes, or ends, the requests that they have passed to it.
    """
    frontends, http = of_role(workers, "frontend"), of_role(workers, "http")
    if http:
        set_draining(workers, NODE_STOPS)
        yield (), lambda: any(one.phase is Phase.READY and one.table.state is State.READY for one in frontends)
        lifecycle.stop(http, by=by)
        yield http, lambda: any(one.process is not None and one.table.state is not State.CLOSED for one in http)
    for role in _ORDER:
        group = of_role(workers, role)
        lifecycle.stop(group, by=by)
        ending = [*group, *http]
        yield ending, partial(_any_runs, ending)


def of_role(workers: Sequence[SupervisedWorker], role: Role) -> list[SupervisedWorker]:
    return [worker for worker in workers if worker.placement.role == role]


def set_draining(workers: Sequence[SupervisedWorker], draining: float) -> None:
    """Set whether the processes that serve HTTP report that the node drains; `NODE_STOPS`: and expect no worker."""
    for worker in (*of_role(workers, "frontend"), *of_role(workers, "http")):
        worker.table.set_knob("draining", draining)


def _any_runs(workers: Sequence[SupervisedWorker]) -> bool:
    return any(worker.process is not None for worker in workers)
