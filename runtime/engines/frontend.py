"""The frontend's process, with the engine that the configuration names."""

from runtime.node.engine_config import OpenAiSection, VllmSection
from runtime.node.worker import Worker
from runtime.serving.frontend.engine import Engine, RestartLimits
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.frontend.router import Router
from runtime.serving.frontend.worker_link import WorkerLink
from runtime.serving.http import process
from runtime.serving.http.service import SearchSource


async def engine_of(worker: Worker, metrics: RequestMetrics, search: SearchSource) -> Engine:
    """The node's engine. Raises ConfigError for servers that can never serve what is configured; one that does not
    answer now is waited for meanwhile.
    """
    match worker.plan.config.model:  # the HTTP client of some is nothing for the others
        case OpenAiSection() as section:
            from runtime.engines.openai.engine import openai_engine

            return await openai_engine(worker, section, metrics, search)
        case VllmSection() as section:
            from runtime.engines.vllm.start import vllm_engine

            return await vllm_engine(worker, section, metrics, search)
    return trinity_engine(worker, metrics)


def run(worker: Worker) -> None:
    """The process: serve until told to stop, then finish what is in flight."""
    process.run(worker, engine_of)


# ---- the node's own prefill and decode workers as the engine: the frontend's link to them has the interface as it is


def trinity_engine(worker: Worker, metrics: RequestMetrics) -> WorkerLink:
    """The link to the workers of the frontend's node, which connect to it."""
    http = worker.plan.config.http
    return WorkerLink(
        worker.plan.endpoint("frontend"),
        Router(max_in_flight=http.max_in_flight, overlap_weight=http.overlap_weight),
        epoch=worker.epoch,
        on_end=metrics.record_end,
        on_refused=metrics.record_refusal,
        restarts=RestartLimits(http.restarts, int(http.restart_wait_s * 1e9)),
        keep_traces=http.traces,
    )
