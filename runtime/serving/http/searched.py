"""What a request may search: the collection that it names, or a client's vector store, within the rights of its key."""

from collections.abc import Sequence

from starlette.requests import Request

from ipc import SearchSpec
from runtime.errors import InvalidRequest, UnknownCollection
from runtime.node.stores_config import STORE_PREFIX, STORES
from runtime.retrieval.attributes.filters import Filter, filter_bytes
from runtime.retrieval.search.query import Query, Rerank
from runtime.retrieval.stores.records import Store
from runtime.retrieval.stores.service import Stores
from runtime.serving.http.access import Access, access_of, tenant_of
from runtime.serving.http.api_types import RetrievalOptions
from runtime.serving.http.parsing import check_bytes, params_named
from runtime.serving.http.retrieval_body import PlainBody, RetrievalBody
from runtime.serving.http.service import Settings
from runtime.serving.messages import Retrieval


async def retrieval_of(
    options: RetrievalOptions, rerank: Rerank | None, http: Request, stores: Stores | None, settings: Settings
) -> tuple[Retrieval, Store | None]:
    """Return what a chat retrieves, with the node's defaults and restricted to what the key may find, and the client's
    store that it searches, if it is one.

    Raises InvalidRequest, `UnknownCollection`, `UnknownObject` and Forbidden.
    """
    probes = options.with_defaults(settings.probes, "retrieval")
    check_probe_tokens(options.probe_tokens or 0, settings, "retrieval.probe_tokens")
    name, access = options.collection or "", access_of(http)
    if stores is None or not name.startswith(STORE_PREFIX):
        name = searched_collection(name, options.k, access, settings, "retrieval.")
    check_k(options.k, settings, "retrieval.k")
    collection, wanted = await restricted([name], options.filter, http, stores, settings, "retrieval.collection")
    store = await stores.store(name, tenant_of(http)) if stores is not None and collection == STORES else None
    retrieval = Retrieval(
        collection, options.k, **probes, probe_tokens=options.probe_tokens or 0, filter=filter_bytes(wanted),
        hybrid=options.hybrid, flow=access.flow, rerank=rerank,
    )  # fmt: skip
    return retrieval, store


async def restricted(
    names: Sequence[str],
    wanted: Filter | None,
    http: Request,
    stores: Stores | None,
    settings: Settings,
    param: str,
) -> tuple[str, Filter | None]:
    """Return the collection that a search of the named stores is in, and its filter there: stores that clients made, or
    one configured collection, within the rights of the key.

    Raises InvalidRequest, `UnknownCollection`, `UnknownObject` and Forbidden.
    """
    own = [name for name in names if name.startswith(STORE_PREFIX)]
    if stores is not None and len(own) == len(names):
        with params_named({"id": param, "vector_store_id": param}):
            return STORES, await stores.filter(own, tenant_of(http), wanted)
    if len(names) > 1:
        raise InvalidRequest(
            "several vector stores can be searched at once only if all of them were made by clients", param
        )
    access = access_of(http)
    collection = access.resolve(names[0], settings.collections, param, "vector store")
    return collection, access.restrict(collection, wanted)


def searched_collection(name: str, k: int, access: Access, settings: Settings, prefix: str = "") -> str:
    """Return the named collection, or the only one that the key may access.

    Raises InvalidRequest, also for too large a `k`, `UnknownCollection` and Forbidden.
    """
    known = settings.collections
    if not known:
        raise UnknownCollection("this node has no collections", f"{prefix}collection")
    if not name:
        names = access.visible(known)
        if len(names) != 1:
            loaded = ", ".join(names) or "none"
            raise InvalidRequest(f"{prefix}collection is missing; loaded: {loaded}", f"{prefix}collection")
        name = names[0]
    resolved = access.resolve(name, known, f"{prefix}collection")
    check_k(k, settings, f"{prefix}k")
    return resolved


def query_of(body: RetrievalBody | PlainBody, access: Access, settings: Settings) -> Query:
    """Return the query of a search without generation, restricted to what the key may find.

    Raises InvalidRequest, `UnknownCollection` and Forbidden.
    """
    if (body.query is None) == (body.vector is None):
        raise InvalidRequest("set either query (text) or vector", "query")
    collection = searched_collection(body.collection or "", body.k, access, settings)
    if body.query is not None:
        check_bytes(len(body.query.encode()), settings.max_prompt_bytes, "query")
    dim = settings.collections[collection]
    if body.vector is not None and dim and len(body.vector) != dim:
        raise InvalidRequest(
            f"vector has {len(body.vector)} numbers, collection {collection!r} has dimension {dim}", "vector"
        )
    rerank = settings.ranker.of_options(body.rerank, "rerank")
    if rerank is not None and body.query is None:
        raise InvalidRequest("rerank requires a text: use query instead of vector", "rerank")
    wanted = filter_bytes(access.restrict(collection, body.filter))
    spec = SearchSpec(collection, body.k, filter=wanted, flow=access.flow)
    return Query(spec, body.vector, body.query or "", body.hybrid, rerank=rerank)


def check_k(k: int, settings: Settings, param: str) -> None:
    """Raise InvalidRequest for more passages than a search may find."""
    if k > settings.max_k:
        raise InvalidRequest(f"{param.rpartition('.')[2]} is {k}, the limit is {settings.max_k}", param)


def check_probe_tokens(tokens: int, settings: Settings, param: str) -> None:
    """Raise InvalidRequest for more tokens than a probe may insert."""
    if tokens > (limit := settings.max_probe_tokens):
        raise InvalidRequest(f"probe_tokens is {tokens}, the limit is {limit}", param)
