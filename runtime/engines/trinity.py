"""The node's own prefill and decode workers as the engine: the frontend's link to them has the interface as it is."""

from runtime.node.worker import Worker
from runtime.serving.frontend.measures import Measures
from runtime.serving.frontend.router import Router
from runtime.serving.frontend.starts import RestartLimits
from runtime.serving.frontend.worker_link import WorkerLink


def trinity_engine(worker: Worker, measures: Measures) -> WorkerLink:
    """The link to the workers of the frontend's node, which connect to it."""
    http = worker.plan.config.http
    return WorkerLink(
        worker.plan.endpoint("frontend"),
        Router(max_in_flight=http.max_in_flight),
        epoch=worker.epoch,
        on_end=measures.ended,
        on_refused=measures.refused,
        restarts=RestartLimits(http.restarts, int(http.restart_wait_s * 1e9)),
        keep_traces=http.traces,
    )
