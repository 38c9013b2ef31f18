"""What a request may search: the collection that it names, or a client's vector store, within the rights of its key."""

from msgspec.structs import replace
from starlette.requests import Request

from ipc import SearchSpec
from runtime.errors import InvalidRequest, UnknownCollection
from runtime.node.stores_config import STORES
from runtime.retrieval.attributes.filters import decode_filter, filter_bytes
from runtime.retrieval.search.query import Query
from runtime.retrieval.stores.records import Store
from runtime.retrieval.stores.service import Stores
from runtime.serving.http.access import Access, access_of
from runtime.serving.http.parsing import check_bytes
from runtime.serving.http.retrieval_body import PlainBody, RetrievalBody
from runtime.serving.http.routes.files import tenant_of
from runtime.serving.http.routes.store_objects import STORE_PREFIX
from runtime.serving.http.service import Settings
from runtime.serving.messages import Retrieval


async def authorized(
    retrieval: Retrieval, http: Request, stores: Stores | None, settings: Settings
) -> tuple[Retrieval, Store | None]:
    """Return the retrieval restricted to what the key may find, and the client's store that it searches, if it is one.

    Raises InvalidRequest, `UnknownCollection`, `UnknownObject` and Forbidden.
    """
    access, limit = access_of(http), settings.probes.passage_tokens
    if retrieval.probe_tokens > limit:
        raise InvalidRequest(
            f"probe_tokens is {retrieval.probe_tokens}, the limit is {limit}", "retrieval.probe_tokens"
        )
    if stores is not None and retrieval.collection.startswith(STORE_PREFIX):
        _check_k(retrieval.k, settings, "retrieval.")
        wanted = decode_filter(retrieval.filter) if retrieval.filter else None
        found = filter_bytes(await stores.filter([retrieval.collection], tenant_of(http), wanted))
        store = await stores.store(retrieval.collection, tenant_of(http))
        return replace(retrieval, collection=STORES, filter=found, flow=access.flow), store
    collection = searched_collection(retrieval.collection, retrieval.k, access, settings, "retrieval.")
    restricted = access.restrict_bytes(collection, retrieval.filter)
    return replace(retrieval, collection=collection, filter=restricted, flow=access.flow), None


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
    found = access.resolve(name, known, f"{prefix}collection")
    _check_k(k, settings, prefix)
    return found


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


def _check_k(k: int, settings: Settings, prefix: str) -> None:
    if k > settings.max_k:
        raise InvalidRequest(f"k is {k}, the limit is {settings.max_k}", f"{prefix}k")
