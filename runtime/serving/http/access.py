"""Access rights of API keys: a key has access to all collections, or to some, possibly restricted to one tenant's
documents."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from starlette.requests import Request

from runtime.errors import Forbidden, UnknownCollection
from runtime.node.api_keys import ApiKey
from runtime.retrieval.attributes.filters import (
    AttributeBinding,
    Filter,
    both_filters,
    excludes,
)


@dataclass(frozen=True)
class Access:
    """Access rights of an API key. `grants`: collection → restriction, None for all of it; no grants: full access.

    `flow`: the key's number, by which it shares what is limited with the other keys; 0 if there are no others.
    """

    grants: Mapping[str, AttributeBinding | None] | None = None
    flow: int = field(default=0, compare=False)

    @cached_property
    def salt(self) -> bytes:
        """KV cache salt: keys with the same access rights share cached prefixes; b"" for full access."""
        if self.grants is None:
            return b""
        return blake2b(repr(sorted(self.grants.items())).encode(), digest_size=16).digest()

    @property
    def tenant(self) -> str:
        """Whose files, stores, responses and traces the key sees; "" for full access: keys with the same access rights
        share one."""
        return self.salt.hex()

    def head_start_s(self, wanted_s: float) -> float:
        """Return the head start of a prompt: a restricted key may let others go first, not go before them."""
        return wanted_s if self.grants is None else min(wanted_s, 0.0)

    def visible(self, collections: Iterable[str]) -> list[str]:
        """Return those of the collections that the key may access."""
        return [name for name in collections if self.grants is None or name in self.grants]

    def restriction(self, collection: str) -> AttributeBinding | None:
        """Return the attribute value that documents found or written must have. Raises `Forbidden`."""
        if self.grants is None:
            return None
        if collection not in self.grants:
            raise Forbidden(f"this API key has no access to collection {collection[:128]!r}", "collection")
        return self.grants[collection]

    def resolve(self, name: str, loaded: Iterable[str], param: str, noun: str = "collection") -> str:
        """Return the name of a loaded collection that the key may access. Raises `UnknownCollection`, `Forbidden`."""
        if name not in loaded:
            visible = ", ".join(self.visible(loaded)) or "none"
            raise UnknownCollection(f"no {noun} {name[:128]!r} is loaded; loaded: {visible}", param)
        self.restriction(name)
        return name

    def require_whole_collection(self, collection: str) -> None:
        """Raise `Forbidden` unless the key may access the entire collection."""
        if self.restriction(collection) is not None:
            raise Forbidden(f"this API key has access only to a part of collection {collection!r}", "collection")

    def require_operator(self) -> None:
        """Raise `Forbidden` for a key restricted to collections: tenants may not operate the node."""
        if self.grants is not None:
            raise Forbidden("this API key is restricted to collections and may not operate the node")

    def restrict(self, collection: str, requested: Filter | None) -> Filter | None:
        """Return the search filter combined with the key's restriction. Raises `Forbidden`."""
        own = self.restriction(collection)
        if own is None:
            return requested
        if requested is not None and excludes(requested, own):
            raise Forbidden(f"this API key may not filter for another {own.key!r} than its own", "filter")
        return both_filters(own.filter(), requested)


FULL_ACCESS = Access()


def access_by_key(keys: Iterable[ApiKey]) -> dict[str, Access]:
    """Return the access rights of the keys without full access."""
    return {
        one.key: Access({name: bound and AttributeBinding(*bound) for name, bound in one.grants.items()})
        for one in keys
        if one.grants is not None
    }


def access_of(http: Request) -> Access:
    """Return the access rights that the middleware has determined for a request."""
    access = http.scope["state"]["access"]
    assert isinstance(access, Access)
    return access


def tenant_of(http: Request) -> str:
    """Return the tenant of a request: see `Access.tenant`."""
    return access_of(http).tenant
