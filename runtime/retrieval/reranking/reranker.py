"""Rerankers: models that score how relevant texts are to a query. Their interface, and loading."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from runtime.errors import ConfigError, ModelError
from runtime.node.api_keys import read_key
from runtime.node.placement.plan import NodePlan
from runtime.node.retrieval_config import RerankSection
from runtime.retrieval.embedding.model_directory import read_model_directory


class Scored(NamedTuple):
    """Scores of texts, higher for more relevant ones, and the number of tokens read; 0: unknown."""

    scores: Sequence[float]
    tokens: int


class Batch(NamedTuple):
    """Texts that are scored together: their positions, and the call that scores them, in this order.

    The call is given a time (monotonic ns) after which its result is useless. It raises `TrinityError`.
    """

    rows: Sequence[int]
    score: Callable[[int], Scored]


class Reranker(Protocol):
    """Interface of rerankers. Thread-safe."""

    @property
    def name(self) -> str:
        """Name in requests."""

    @property
    def max_concurrency(self) -> int:
        """Useful number of concurrent requests to a server; 1 if it computes in this process."""

    def batches(self, query: str, texts: Sequence[str]) -> Sequence[Batch]:
        """Prepare texts for scoring, and divide them into batches. Raises `InvalidRequest` for invalid Unicode."""


def load_reranker(plan: NodePlan) -> Reranker | None:
    """Load the node's reranker, if it has one. Raises `ModelError`, `ConfigError`."""
    section = plan.config.rerank
    if not section.model:
        return None
    if section.url:
        from runtime.retrieval.reranking.server import RerankServer  # an HTTP client

        return RerankServer(section.model, section.url, read_key(section.key_file, "the reranker's"))
    from runtime.retrieval.reranking.cross_encoder import CrossEncoder

    return CrossEncoder(read_model_directory(Path(section.model)))


def check_reranker(section: RerankSection) -> None:
    """Raise the errors of `load_reranker` that can be found without loading anything, as `ConfigError`."""
    if section.url:
        read_key(section.key_file, "the reranker's")
    elif section.model:
        try:
            read_model_directory(Path(section.model))
        except ModelError as error:
            raise ConfigError(f"rerank.model: {error.message}") from error
