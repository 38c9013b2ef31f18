"""Which searches are reranked: the options of requests, and the node's reranker."""

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.retrieval.passages import RERANKED
from runtime.retrieval.search.query import Rerank
from runtime.serving.http.parsing import StrictModel

_DEFAULT_RANKERS = ("auto", "default-2024-11-15", "default-2024-08-21", "default_2024_08_21")
"""OpenAI's names, which here mean the node's reranker, if it has one."""


class RerankOptions(StrictModel, extra="forbid"):
    """`rerank` of a search or of a chat's `retrieval`."""

    timeout_s: float | None = Field(None, gt=0, le=60)


@dataclass(frozen=True, slots=True)
class Ranker:
    """The node's reranker: its name in requests ("": there is none), and the default limit of its time."""

    name: str = ""
    timeout_s: float = 2.0

    def of_options(self, options: RerankOptions | None, param: str) -> Rerank | None:
        """Return what `rerank` of a request means. Raises `InvalidRequest` on a node without reranker."""
        if options is None:
            return None
        if not self.name:
            raise InvalidRequest("this node has no reranker: set model in [rerank] of its configuration", param)
        return Rerank(options.timeout_s or self.timeout_s)

    def of_name(self, ranker: str, timeout_s: float | None, min_score: float, param: str) -> Rerank | None:
        """Return what OpenAI's `ranker` means; None: no reranking. Raises `InvalidRequest` for an unknown one."""
        if ranker == "none" or (ranker in _DEFAULT_RANKERS and not self.name):
            return None
        if ranker not in (*_DEFAULT_RANKERS, self.name):
            known = ", ".join(("none", *_DEFAULT_RANKERS, *filter(None, [self.name])))
            raise InvalidRequest(f"ranker {ranker[:128]!r} is unknown; known: {known}", param)
        return Rerank(timeout_s or self.timeout_s, min_score if min_score > 0 else -1e30)


def ranking_json(ranking: str) -> dict[str, Any]:
    """Return the fields of a response whose passages were to be reranked (`FoundPassages.ranking`); {} if not."""
    if ranking in ("", RERANKED):
        return {"reranked": True} if ranking else {}
    return {"reranked": False, "rerank_error": ranking}
