"""POST /v1/retrieval: a search without generation."""

from starlette.requests import Request
from starlette.responses import Response

from runtime.retrieval.passages import FoundPassages
from runtime.serving.http.access import access_of
from runtime.serving.http.api import Api
from runtime.serving.http.middleware import arrived_ns, client_id_of, request_id
from runtime.serving.http.ranking import ranking_json
from runtime.serving.http.response_memory import unsent_response
from runtime.serving.http.responses import FoundJson, Json, passages_response
from runtime.serving.http.retrieval_body import parse_retrieval
from runtime.serving.http.searched import query_of


async def retrieve(api: Api, http: Request) -> Response:
    query = query_of(parse_retrieval(await api.read(http)), access_of(http), api.settings)

    def respond(passages: FoundPassages) -> Response:
        found = [FoundJson(one.id, one.title, one.distance, one.text, one.score, one.attributes) for one in passages]
        result: Json = {
            "id": request_id(http), "object": "retrieval", "collection": query.spec.collection, "passages": found,
        }  # fmt: skip
        return passages_response(result | ranking_json(passages.ranking))

    return await api.searches.run(
        query, request_id(http), client_id_of(http), respond=respond, reserve=unsent_response(http).reserve,
        received_ns=arrived_ns(http),
    )  # fmt: skip
