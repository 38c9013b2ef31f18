"""The OpenAI engine over the vLLM instances that the node runs."""

from runtime.engines.openai.engine import OpenAiEngine, engine_over
from runtime.engines.openai.http import Http
from runtime.engines.openai.server import Server
from runtime.engines.vllm.command import event_endpoints
from runtime.node.engine_config import VllmSection
from runtime.node.worker import Worker
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.http.service import Collections

_MAX_BACKOFF_S = 0.5  # short: checking a local instance is cheap


async def vllm_engine(
    worker: Worker, section: VllmSection, metrics: RequestMetrics, search: Collections
) -> OpenAiEngine:
    """Create the engine; instances join as they become ready, which the node's health reports."""
    instances = [
        Server(
            f"http://{placement.name}/v1",
            http=Http(worker.plan.http_socket(placement.name)),
            stage=placement.stage,
            ranks=section.stages[placement.stage].tensor_parallel_size,
            events=event_endpoints(worker.plan, placement),
        )
        for placement in worker.plan.of_role("engine")
    ]
    return await engine_over(instances, worker, section, metrics, search, max_backoff_s=_MAX_BACKOFF_S)
