"""/v1/responses: answers with file search, stored so that later ones can continue them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.filters import filter_bytes
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.records import StoredResponse, UnknownObject, new_id
from runtime.retrieval.stores.responses import ResponseStore
from runtime.retrieval.stores.service import Stores
from runtime.serving.frontend.requests import Request as InFlight
from runtime.serving.http.access import access_of, tenant_of
from runtime.serving.http.api import Api
from runtime.serving.http.middleware import client_id_of, request_id
from runtime.serving.http.parsing import check_bytes, params_named
from runtime.serving.http.ranking import ranking_json
from runtime.serving.http.response_objects import ResponseBuilder
from runtime.serving.http.responses import EventStream, Json, in_flight, json_response
from runtime.serving.http.routes.responses_body import (
    RESULTS,
    InputFile,
    ResponsesBody,
    parse_responses,
)
from runtime.serving.http.routes.vector_stores import RankingOptions, distance_of, results_of, score_of
from runtime.serving.http.searched import check_k, check_probe_tokens, restricted
from runtime.serving.messages import Message, Retrieval, Retrieved, Sampling, Tokens
from runtime.serving.model.text import last_question, passages_block, question_with_block

_PARAMS = {
    "messages": "input", "max_tokens": "max_output_tokens", "filter": "tools[0].filters", "filters": "tools[0].filters",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The turns up to the answer, without instructions, and the search. metric: of the searched collection."""

    turns: tuple[Message, ...]
    retrieval: Retrieval | None
    metric: str = ""


class ResponsesRoutes:
    """The routes. `now` returns Unix time."""

    def __init__(self, api: Api, now: Callable[[], float]) -> None:
        self._api, self._service, self._settings, self._now = api, api.service, api.settings, now
        self._stored = api.service.responses or ResponseStore(Catalogue(None))

    async def get(self, http: Request) -> Response:
        stored = await self._stored.get(http.path_params["response"], tenant_of(http))
        return Response(bytes(stored.body), media_type="application/json")

    async def delete(self, http: Request) -> Response:
        id = http.path_params["response"]
        await self._stored.delete(id, tenant_of(http))
        return json_response({"id": id, "object": "response", "deleted": True})

    async def create(self, http: Request) -> Response:
        with params_named(_PARAMS):
            return await self._created(http)

    async def _created(self, http: Request) -> Response:
        body, forwarded = parse_responses(await self._api.read(http))
        self._api.check_model(body.model)
        conversation = await self._conversation(http, body)
        builder = self._builder(body, conversation)
        request = self._submit(http, body, conversation, forwarded)
        answer = _Answer(self._service.stores, conversation, builder, request)

        async def store() -> None:
            if body.store:
                await self._stored.put(answer.to_store(tenant_of(http)))

        with in_flight(http, self._service.engine, request) as running:
            # With a search its events come first, otherwise the status tells an error before the answer.
            first = None if body.stream and conversation.retrieval is not None else await answer.first()
            if body.stream:
                return EventStream(request, answer.events(first, store), builder.failure, running.pop_all())
            assert first is not None, "waited for"
            builder.add(first)
            while builder.last is None:
                if isinstance(piece := await request.next(), Tokens):
                    builder.add(piece)
                else:
                    await answer.add_search(piece)
            await store()
        return json_response(builder.body())

    # ---- the request to the engine

    async def _conversation(self, http: Request, body: ResponsesBody) -> _Conversation:
        before: list[Message] = []
        if body.previous_response_id is not None:
            try:
                previous = await self._stored.get(body.previous_response_id, tenant_of(http))
            except UnknownObject as error:
                raise UnknownObject(error.message, "previous_response_id") from error
            before = [Message(role, text) for role, text in previous.turns]
        turns = (*before, *[Message(one.role, await self._text(http, one.parts)) for one in body.input])
        size = len((body.instructions or "").encode(errors="replace"))
        size += sum(len(turn.content.encode(errors="replace")) for turn in turns)
        check_bytes(size, self._settings.max_prompt_bytes, "input")
        if (tool := body.tool) is None:
            return _Conversation(turns, None)
        collection, wanted = await restricted(
            tool.vector_store_ids, tool.filters, http, self._service.stores, self._settings, "tools[0].vector_store_ids"
        )
        metric = self._service.collections.summary(collection).metric
        ranking = tool.ranking_options or RankingOptions.model_validate({})
        settings = self._settings
        check_k(tool.max_num_results, settings, "tools[0].max_num_results")
        check_probe_tokens(tool.probe_tokens, settings, "tools[0].probe_tokens")
        rerank = ranking.rerank(settings.ranker, "tools[0].ranking_options.ranker")
        probes = tool.with_defaults(settings.probes, "tools[0]")
        retrieval = Retrieval(
            collection, tool.max_num_results, **probes, probe_tokens=tool.probe_tokens, filter=filter_bytes(wanted),
            hybrid=ranking.hybrid, flow=access_of(http).flow, quote=True, rerank=rerank,
            max_distance=distance_of(ranking.score_threshold, metric) if rerank is None else 1e30,
        )  # fmt: skip
        return _Conversation(turns, retrieval, metric)

    async def _text(self, http: Request, parts: Sequence[str | InputFile]) -> str:
        """Return the text of a message, with those of its files. Raises `InvalidRequest`."""
        texts, stores = [], self._service.stores
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
            elif stores is None:
                raise InvalidRequest("this node has no files: set [stores] in its configuration", "input")
            else:
                with params_named({"id": "input", "file_id": "input"}):
                    text = await stores.text(part.id, tenant_of(http))
                check_bytes(len(text), self._settings.max_prompt_bytes, "input")
                texts.append(text)
        return "".join(texts)

    def _submit(self, http: Request, body: ResponsesBody, conversation: _Conversation, forwarded: Json) -> InFlight:
        messages = conversation.turns
        if body.instructions is not None:
            messages = (Message("system", body.instructions), *messages)
        sampling = Sampling(
            body.max_output_tokens or self._settings.default_max_tokens, float(body.temperature), float(body.top_p),
            self._api.seeds.getrandbits(63),
        )  # fmt: skip
        generation = self._api.generation(http, body, sampling, conversation.retrieval, messages)
        sent = _sent(body, messages) | forwarded
        return self._service.engine.submit(request_id(http), generation, client_id=client_id_of(http), sent=sent)

    def _builder(self, body: ResponsesBody, conversation: _Conversation) -> ResponseBuilder:
        base: Json = {
            "created_at": int(self._now()),
            "model": self._settings.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": [
                {"type": tool.type, "vector_store_ids": tool.vector_store_ids, "max_num_results": tool.max_num_results}
                for tool in body.tools
            ],
            "top_p": body.top_p,
            "truncation": "disabled",
        }
        query = None if conversation.retrieval is None else last_question(conversation.turns)
        return ResponseBuilder(new_id("resp_"), base, query, RESULTS in body.include)


class _Answer:
    """One answer in progress."""

    def __init__(
        self, stores: Stores | None, conversation: _Conversation, builder: ResponseBuilder, request: InFlight
    ) -> None:
        self._stores, self._conversation, self._builder, self._request = stores, conversation, builder, request
        self._block = ""  # the passages in the prompt

    async def first(self) -> Tokens:
        """Wait for the first tokens, with which the search has ended. Raises the request's error."""
        while True:
            piece = await self._request.next()
            if isinstance(piece, Tokens):
                return piece
            await self.add_search(piece)

    async def add_search(self, retrieved: Retrieved) -> None:
        """Add the passages of a search."""
        if retrieved.texts:
            self._block = passages_block(retrieved.texts)
        if retrieved.ranking:
            self._builder.ranking = ranking_json(retrieved.ranking)
        given = dict(zip((one.id for one in retrieved.passages), retrieved.texts, strict=False))
        metric, searched = self._conversation.metric, self._conversation.retrieval
        collection = searched.collection if searched else ""
        for passage, result in await results_of(self._stores, collection, retrieved.passages):
            self._builder.add_result({
                "file_id": result["file_id"],
                "filename": result["filename"],
                "attributes": result["attributes"],
                "score": score_of(passage.distance, metric) if passage.score is None else passage.score,
                "text": given.get(passage.id, "").removeprefix(f"[{passage.title.strip()}]\n"),
            })  # fmt: skip

    async def events(self, first: Tokens | None, store: Callable[[], Awaitable[None]]) -> AsyncIterator[bytes]:
        """Yield the events; with a search from its start on (first: None), otherwise from the first tokens on.

        `store` is called when the answer is complete. Raises the request's error.
        """
        builder = self._builder
        yield builder.opening()
        if first is None:
            first = await self.first()
            yield builder.searched()
        yield builder.message() + builder.delta(first)
        while builder.last is None:
            parts = []
            for piece in await self._request.next_batch():
                if isinstance(piece, Tokens):
                    parts.append(builder.delta(piece))
                else:
                    await self.add_search(piece)
            yield b"".join(parts)
        await store()
        yield builder.closing()

    def to_store(self, tenant: str) -> StoredResponse:
        """Return the response, with the passages where they stood in the prompt, so that its prefix stays the same."""
        turns = [(turn.role, turn.content) for turn in self._conversation.turns]
        if self._block:
            last = max((at for at, (role, _) in enumerate(turns) if role == "user"), default=len(turns) - 1)
            turns[last] = turns[last][0], question_with_block(self._block, turns[last][1])
        return StoredResponse(
            id=self._builder.id,
            tenant=tenant,
            created_at=self._builder.base["created_at"],
            body=msgspec.Raw(msgspec.json.encode(self._builder.body())),
            turns=[*turns, ("assistant", self._builder.text)],
        )


def _sent(body: ResponsesBody, messages: Sequence[Message]) -> Json:
    """Return the chat for an engine that takes OpenAI's bodies."""
    sent: Json = {"model": body.model, "messages": [{"role": one.role, "content": one.content} for one in messages]}
    sent |= {"temperature": body.temperature, "top_p": body.top_p}
    return sent if body.max_output_tokens is None else sent | {"max_tokens": body.max_output_tokens}
