"""What the documents of a tenant, the owner of an API key that is bound to a value of an attribute, may add to the
schema that all tenants of a collection share.

A tenant must neither use up the names of attributes nor determine the types of those that others rely on. So the
attribute that keys are bound to has the type that the configuration implies, whoever writes first, and the number of
names that a tenant has introduced is limited: those that it was the first to write, as long as any document has them.
"""

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from runtime.errors import InvalidDocument
from runtime.retrieval.attributes.filters import AttributeBinding
from runtime.retrieval.attributes.schema import MAX_ATTRIBUTES, AttributeType, Schema
from runtime.retrieval.collections.state import State
from runtime.retrieval.collections.validation import UpsertDocument

MAX_INTRODUCED = 8  # names, by one tenant
MAX_SHARED = 48  # names of a collection, beyond which only keys without a restriction introduce more


def with_bound_attribute(
    documents: Sequence[UpsertDocument], owner: AttributeBinding, schema: Schema
) -> list[UpsertDocument]:
    """Return the owner's documents with its attribute as a string, or as a list if the collection has lists."""
    lists = schema.get(owner.key) is AttributeType.STRINGS
    bound = {owner.key: [owner.value] if lists else owner.value}
    return [replace(document, attributes={**document.attributes, **bound}) for document in documents]


def introduced_by(
    owner: AttributeBinding | None,
    state: State,
    documents: Sequence[UpsertDocument],
    schema: Schema,
    bound: Collection[str],
) -> dict[str, str]:
    """Return the attributes of these documents that no document has yet, with the owner's text; "" without an owner.

    schema: with these attributes. bound: the attributes that API keys are bound to. Raises `InvalidDocument` if the
    owner may not introduce them.
    """
    names = {name for document in documents for name in document.attributes}
    if owner is None and names.isdisjoint(state.introduced):
        return {}  # nobody is charged for them
    occurring = state.occurring_schema()
    introduced = names - occurring.keys()
    if owner is None:
        return dict.fromkeys(introduced & state.introduced.keys(), "")
    introduced.discard(owner.key)
    if not introduced:
        return {}
    first, total = min(introduced), len(occurring.keys() | introduced)
    for name in introduced.intersection(bound):
        if schema[name] is not AttributeType.STRING:
            raise InvalidDocument(
                f"attribute {name!r} is {schema[name].with_article}; API keys are bound to it, so it must be a string",
                "attributes",
            )
    if total > MAX_SHARED:
        raise InvalidDocument(
            f"attribute {first!r} is new, and with it the collection would have {total} attributes; an API key that is "
            f"bound to {owner.key!r} may introduce some up to {MAX_SHARED} of {MAX_ATTRIBUTES}",
            "attributes",
        )
    own = len(introduced) + sum(state.introduced.get(name) == owner.text for name in occurring)
    if own > MAX_INTRODUCED:
        raise InvalidDocument(
            f"attribute {first!r} is new: with {len(introduced)} new ones, the documents of this API key would have "
            f"introduced {own} attributes; the limit is {MAX_INTRODUCED}",
            "attributes",
        )
    return dict.fromkeys(introduced, owner.text)
