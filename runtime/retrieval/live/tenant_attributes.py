"""What the documents of a tenant, the owner of an API key that is bound to a value of an attribute, may add to the
schema that all tenants of a collection share.

A tenant must neither use up the names of attributes nor determine the types of those that others rely on. So the
attribute that keys are bound to has the type that the configuration implies, whoever writes first, and the number of
names that a tenant has introduced is limited. A name was introduced by the owner of the oldest document that has it.
"""

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from runtime.errors import InvalidDocument
from runtime.retrieval.attributes.filters import AttributeBinding
from runtime.retrieval.attributes.schema import MAX_ATTRIBUTES, AttributeType, Schema
from runtime.retrieval.live.state import State
from runtime.retrieval.live.validation import UpsertDocument

MAX_INTRODUCED = 8  # names, by one tenant
MAX_SHARED = 48  # names of a collection, beyond which only keys without a restriction introduce more


def with_bound_attribute(
    documents: Sequence[UpsertDocument], owner: AttributeBinding, schema: Schema
) -> list[UpsertDocument]:
    """Return the owner's documents with its attribute as a string, or as a list if the collection has lists."""
    lists = schema.get(owner.key) is AttributeType.STRINGS
    bound = {owner.key: [owner.value] if lists else owner.value}
    return [replace(document, attributes={**document.attributes, **bound}) for document in documents]


def check_introduced(
    state: State, owner: AttributeBinding, documents: Sequence[UpsertDocument], schema: Schema, bound: Collection[str]
) -> None:
    """Raise `InvalidDocument` if an owner may not introduce the attributes of its documents that no document has yet.

    schema: with these attributes. bound: the attributes that API keys are bound to.
    """
    occurring = state.occurring_schema()
    introduced = {name for document in documents for name in document.attributes} - occurring.keys() - {owner.key}
    if not introduced:
        return
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
    rows = list(state.oldest_rows(occurring.keys() - state.description.schema.keys() - {owner.key}).values())
    own = sum(document is not None and owner.holds(document.attributes) for document in state.documents(rows))
    if own + len(introduced) > MAX_INTRODUCED:
        raise InvalidDocument(
            f"attribute {first!r} is new: with {len(introduced)} new ones, the documents of this API key would have "
            f"introduced {own + len(introduced)} attributes; the limit is {MAX_INTRODUCED}",
            "attributes",
        )
