"""The frontend's process, with the engine that the configuration names."""

from runtime.engines.trinity import trinity_engine
from runtime.node.engine_config import OpenAiSection, VllmSection
from runtime.node.worker import Worker
from runtime.serving.frontend import process
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.measures import Measures
from runtime.serving.http.service import SearchSource


async def engine_of(worker: Worker, measures: Measures, search: SearchSource) -> Engine:
    """The node's engine. Raises ConfigError for servers that can never serve what is configured; one that does not
    answer now is waited for meanwhile.
    """
    match worker.plan.config.model:  # the HTTP client of some is nothing for the others
        case OpenAiSection() as section:
            from runtime.engines.openai.start import openai_engine

            return await openai_engine(worker, section, measures, search)
        case VllmSection() as section:
            from runtime.engines.vllm.start import vllm_engine

            return await vllm_engine(worker, section, measures, search)
    return trinity_engine(worker, measures)


def run(worker: Worker) -> None:
    """The process: serve until told to stop, then finish what is in flight."""
    process.run(worker, engine_of)
