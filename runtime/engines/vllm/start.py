"""The frontend's engine over the instances that the node runs."""

from functools import partial

from runtime.engines.openai.abilities import ask
from runtime.engines.openai.engine import OpenAiEngine, engine_over
from runtime.engines.openai.http import AioHttp
from runtime.engines.openai.server import Server
from runtime.engines.openai.servers import Servers
from runtime.node.engine_config import VllmSection
from runtime.node.worker import Worker
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.http.service import SearchSource

_LOOK_S = 0.5  # it costs nothing to ask whether the node's own is back


async def vllm_engine(
    worker: Worker, section: VllmSection, metrics: RequestMetrics, search: SearchSource
) -> OpenAiEngine:
    """The instances are found when they are ready; the node's health says so."""
    instances = [
        Server(
            f"http://{place.name}/v1",
            http=AioHttp(section.connect_s, worker.plan.engine_socket(place.name)),
            stage=place.stage,
        )
        for place in worker.plan.of_role("engine")
    ]
    servers = Servers(
        instances,
        partial(ask, section=section),
        look_s=_LOOK_S,
        overlap_weight=worker.plan.config.http.overlap_weight,
    )
    return await engine_over(servers, worker, section, metrics, search)
