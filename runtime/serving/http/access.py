"""What the API key of a request may reach: every collection, or some, of which it may be bound to one tenant's part."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from starlette.requests import Request

from runtime.errors import Forbidden
from runtime.node.api_keys import ApiKey
from runtime.retrieval.attributes.filters import Bound, Filter, both, decode_filter, excludes, filter_bytes


@dataclass(frozen=True)
class Access:
    """grants: by collection, what its searches and writes are bound to, None for all of it; None: everything."""

    grants: Mapping[str, Bound | None] | None = None

    @property
    def salt(self) -> bytes:
        """Equal for keys that reach the same, which share KV; b"" for those that reach everything."""
        if self.grants is None:
            return b""
        return blake2b(repr(sorted(self.grants.items())).encode(), digest_size=16).digest()

    def some(self, collections: Iterable[str]) -> list[str]:
        """Those of some collections that may be reached."""
        return [name for name in collections if self.grants is None or name in self.grants]

    def bound(self, collection: str) -> Bound | None:
        """What has to hold of each document that is found or written. Raises `Forbidden`."""
        if self.grants is None:
            return None
        if collection not in self.grants:
            raise Forbidden(f"this API key may not reach collection {collection[:128]!r}", "collection")
        return self.grants[collection]

    def check_whole(self, collection: str) -> None:
        """Raises `Forbidden` unless all of a collection may be reached."""
        if self.bound(collection) is not None:
            raise Forbidden(f"this API key reaches a part of collection {collection!r} alone", "collection")

    def check_operator(self) -> None:
        """Raises `Forbidden` for a key that is bound to collections: those of tenants do not steer the node."""
        if self.grants is not None:
            raise Forbidden("this API key is bound to collections, and does not steer the node")

    def wanted(self, collection: str, asked: Filter | None) -> Filter | None:
        """The filter of a search. Raises `Forbidden` for a collection or a value that is not the key's own."""
        own = self.bound(collection)
        if own is None:
            return asked
        if asked is not None and excludes(asked, own):
            raise Forbidden(f"this API key may ask for no other {own.key!r} than its own", "filter")
        return both(own.filter(), asked)

    def wanted_bytes(self, collection: str, asked: bytes) -> bytes:
        """`wanted` of a filter as it travels to a pool; b"": none."""
        return filter_bytes(self.wanted(collection, decode_filter(asked) if asked else None))


EVERYTHING = Access()


def accesses(keys: Iterable[ApiKey]) -> dict[str, Access]:
    """What keys may reach, of those that may not reach everything."""
    return {
        one.key: Access({name: bound and Bound(*bound) for name, bound in one.grants.items()})
        for one in keys
        if one.grants is not None
    }


def access_of(http: Request) -> Access:
    """What the request's key may reach, as the guard has found it."""
    found = http.state.access
    assert isinstance(found, Access)
    return found
