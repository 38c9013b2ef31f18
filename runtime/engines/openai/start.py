"""The engine of a node in front of servers, made from its configuration."""

from functools import partial

from runtime.engines.openai.abilities import ask
from runtime.engines.openai.engine import OpenAiEngine
from runtime.engines.openai.server import Server
from runtime.engines.openai.servers import Servers
from runtime.node.engine_config import OpenAiSection, ServedSection, VllmSection
from runtime.node.placement.plan import read_engine_key
from runtime.node.worker import Worker
from runtime.serving.frontend.measures import Measures
from runtime.serving.frontend.starts import RestartLimits
from runtime.serving.http.service import SearchSource


async def openai_engine(
    worker: Worker, section: OpenAiSection, measures: Measures, search: SearchSource
) -> OpenAiEngine:
    """Over the servers at the section's URLs. Raises as `engine_over`."""
    key = read_engine_key(section)
    servers = Servers(
        [Server(url, key, section.connect_s) for url in section.urls],
        partial(ask, section=section),
        advice="start it, or mend model.url",
    )
    return await engine_over(servers, worker, section, measures, search)


async def engine_over(
    servers: Servers, worker: Worker, section: ServedSection, measures: Measures, search: SearchSource
) -> OpenAiEngine:
    """All servers are asked first. Raises ConfigError for one that can never serve what is configured; one that does
    not answer now is waited for meanwhile.
    """
    http = worker.plan.config.http
    await servers.reach()
    return OpenAiEngine(
        servers,
        section,
        search,
        epoch=worker.epoch,
        max_in_flight=http.max_in_flight,
        restarts=RestartLimits(http.restarts, int(http.restart_wait_s * 1e9)),
        handover_tokens=section.handover_tokens if isinstance(section, VllmSection) else "auto",
        on_end=measures.relayed,
        on_refused=measures.refused,
        keep_traces=http.traces,
    )
