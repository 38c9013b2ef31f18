"""The frontend's process with the configured engine."""

from functools import partial

from runtime.node.engine_config import OpenAiSection, VllmSection
from runtime.node.worker import Worker
from runtime.serving.frontend.engine import Engine, RestartLimits
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.frontend.router import Router
from runtime.serving.frontend.worker_link import WorkerLink
from runtime.serving.http import process
from runtime.serving.http.service import Collections
from runtime.serving.kv.file_tier import has_block


async def create_engine(worker: Worker, metrics: RequestMetrics, search: Collections) -> Engine:
    """Create the configured engine.

    Raises ConfigError for servers that can never serve the configuration; one that is down now may come up later.
    """
    match worker.plan.config.model:  # imported here: not every engine needs the HTTP client
        case OpenAiSection() as section:
            from runtime.engines.openai.engine import openai_engine

            return await openai_engine(worker, section, metrics, search)
        case VllmSection() as section:
            from runtime.engines.vllm.engine import vllm_engine

            return await vllm_engine(worker, section, metrics, search)
    return trinity_engine(worker, metrics)


def run(worker: Worker) -> None:
    """Run the process: serve until stopped, then drain."""
    process.run(worker, create_engine)


# ---- engine "trinity": the link to the node's own workers implements the interface itself


def trinity_engine(worker: Worker, metrics: RequestMetrics) -> WorkerLink:
    """Create the link to the node's prefill and decode workers, which connect to it."""
    config, http = worker.plan.config, worker.plan.config.http
    in_tier = partial(has_block, worker.plan.kv_directory) if config.kv.host_mib else lambda key: False
    return WorkerLink(
        worker.plan.endpoint("frontend"),
        Router(max_in_flight=http.max_in_flight, overlap_weight=http.overlap_weight, in_tier=in_tier),
        epoch=worker.epoch,
        on_end=metrics.record_end,
        on_refused=metrics.record_refusal,
        restarts=RestartLimits(wait_ns=int(config.restart_wait_s * 1e9)),
    )
