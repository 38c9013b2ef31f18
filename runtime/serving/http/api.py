"""What the routes share."""

import random

from starlette.requests import ClientDisconnect, Request

from runtime.errors import UnknownModel
from runtime.retrieval.fair_gate import FairLimit
from runtime.serving.frontend.requests import ClientDisconnected
from runtime.serving.http.access import access_of
from runtime.serving.http.api_types import Prioritized
from runtime.serving.http.middleware import BodyMemory, read_body
from runtime.serving.http.service import Searches, Service, Settings
from runtime.serving.messages import Generation, Message, Retrieval, Sampling

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


class Api:
    """What the process serves with, its limits, and the requests' bodies. limits: of POST requests, by path."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self.service, self.settings = service, settings
        self.searches = Searches(
            service.collections,
            service.engine.traces,
            settings.max_searches,
            settings.search_timeout_s,
            service.on_searched,
        )
        self.limits = {
            "/v1/retrieval": self.searches.limit,
            "/v1/embeddings": FairLimit(settings.max_searches, "embedding requests"),
            **dict.fromkeys(RERANK_PATHS, FairLimit(settings.max_searches, "rerank requests")),
        }
        self.seeds = random.Random()  # of requests without a seed
        self._bodies = BodyMemory()

    async def read(self, http: Request) -> bytes:
        """Return a request's body, within the limits. Raises `ClientDisconnected`."""
        try:
            return await read_body(http, self._bodies, self.settings.max_body_bytes, self.settings.body_timeout_s)
        except ClientDisconnect:
            raise ClientDisconnected("the client closed the connection before its body was complete") from None

    def generation(
        self,
        http: Request,
        body: Prioritized,
        sampling: Sampling,
        retrieval: Retrieval | None,
        messages: tuple[Message, ...],
        prompt: str | tuple[int, ...] = "",
    ) -> Generation:
        """Return the message for the workers, within the rights of the request's key."""
        now_ns, access = self.service.engine.now_ns(), access_of(http)
        return Generation(
            sampling, now_ns, now_ns + int(self.settings.http.request_timeout_s * 1e9), messages, prompt, retrieval,
            access.salt, access.head_start_s(body.head_start_s()), body.nvext.agent_hints.osl,
        )  # fmt: skip

    def check_model(self, model: str) -> None:
        """Raise `UnknownModel` for a name that the node's model does not have."""
        served = self.settings.model
        if not served or model not in (served, *self.settings.http.model_aliases):
            served = repr(served) if served else "none"
            raise UnknownModel(f"model {model[:128]!r} is not served; served: {served}", "model")
