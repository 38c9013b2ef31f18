"""The collection of all stores' passages. A store is its documents with one value of the attribute `store`, which every
search must bind; so a store costs nothing while it is empty, and there may be thousands.

A store's files have attributes with names of their own, and of types that another store's may contradict. A collection
has a schema instead, so each store maps its names to the columns `string0` …, `number0` …, `boolean0` …: a search binds
the store, so the same column may mean another name in another store.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.errors import CollectionError, InvalidFilter, InvalidRequest
from runtime.retrieval.attributes.filters import (
    AllOf,
    AnyOf,
    Comparison,
    Filter,
    Not,
    Scalar,
    both_filters,
)
from runtime.retrieval.attributes.schema import AttributeType
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.embedding.loading import embedder_dim

STORE, FILE, FILENAME = "store", "file", "filename"
COLUMNS_PER_TYPE = 16
_TYPES = {
    "string": AttributeType.STRING,
    "number": AttributeType.FLOAT,
    "boolean": AttributeType.BOOLEAN,
}
_NOTHING = Comparison(STORE, "eq", ("",))
Columns = Mapping[str, str]
"""The columns of a store's attributes: `type:name` → column."""


def ensure(directory: Path, embedder: str) -> None:
    """Create the collection if it is missing. Raises `CollectionError`, `ModelError`."""
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CollectionError(f"{directory.parent} cannot be created: {error.strerror}") from error
    columns = {f"{kind}{n}": of for kind, of in _TYPES.items() for n in range(COLUMNS_PER_TYPE)}
    schema = dict.fromkeys((STORE, FILE, FILENAME), AttributeType.STRING) | columns
    bulk_load.ensure(directory, embedder_dim(embedder), embedder=embedder, demanded=STORE, schema=schema)


def _type_of(value: Scalar) -> str:
    return "boolean" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"


def with_columns(columns: Columns, attributes: Mapping[str, Scalar]) -> dict[str, str]:
    """Return a store's columns, extended by those of a file's attributes. Raises `InvalidRequest` beyond the limit."""
    assigned = dict(columns)
    for name, value in attributes.items():
        key, kind = f"{_type_of(value)}:{name}", _type_of(value)
        if key in assigned:
            continue
        used = sum(column.startswith(kind) for column in assigned.values())
        if used == COLUMNS_PER_TYPE:
            raise InvalidRequest(
                f"attribute {name!r}: the files of a vector store have {used} attributes that are a {kind}, the limit",
                "attributes",
            )
        assigned[key] = f"{kind}{used}"
    return assigned


def stored_attributes(
    store: str, file: str, filename: str, columns: Columns, attributes: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Return the attributes of a file's passages in the collection."""
    values = {columns[f"{_type_of(value)}:{name}"]: value for name, value in attributes.items()}
    return {STORE: store, FILE: file, FILENAME: filename} | values


def attributes_of(columns: Columns, stored: Mapping[str, object]) -> dict[str, object]:
    """Return a file's attributes from those of its passages in the collection."""
    return {key.partition(":")[2]: stored[column] for key, column in columns.items() if column in stored}


def store_filter(stores: Mapping[str, Columns], wanted: Filter | None = None) -> Filter:
    """Return the filter for the passages of these stores that pass `wanted`, a filter of their files' attributes.

    As in OpenAI's API a file without an attribute, or with a value of another type, passes only `ne` and `nin`.
    `filename` is the file's name, unless files of the store have an attribute of that name. Raises `InvalidFilter` for
    an order of booleans.
    """
    names_by_filter: dict[Filter | None, list[str]] = {}  # so that its comparisons do not count once for each store
    for name, columns in stores.items():
        translated = None if wanted is None else _translated(columns, wanted)
        names_by_filter.setdefault(translated, []).append(name)
    parts = [both_filters(_one_of(names), translated) for translated, names in names_by_filter.items()]
    filters = tuple(part for part in parts if part is not None)
    return filters[0] if len(filters) == 1 else AnyOf(filters)


def _one_of(stores: Sequence[str]) -> Comparison:
    return Comparison(STORE, "eq" if len(stores) == 1 else "in", tuple(sorted(stores)))


def _translated(columns: Columns, wanted: Filter) -> Filter:
    match wanted:
        case Comparison():
            return _in_columns(columns, wanted)
        case Not(inner):
            return Not(_translated(columns, inner))
        case AllOf(parts):
            return AllOf(tuple(_translated(columns, part) for part in parts))
        case AnyOf(parts):
            return AnyOf(tuple(_translated(columns, part) for part in parts))


def _in_columns(columns: Columns, wanted: Comparison) -> Filter:
    """Return a comparison of the columns that have its attribute with values of its types."""
    key, operator = wanted.key, wanted.operator
    if operator not in ("eq", "in") and isinstance(wanted.values[0], bool):
        raise InvalidFilter(
            f"{key!r} is compared with a boolean, which has no order: {operator} is not possible", "filters"
        )
    by_column: dict[str, list[Scalar]] = {}
    for value in wanted.values:
        column = columns.get(f"{_type_of(value)}:{key}")
        if column is None and key == FILENAME and isinstance(value, str):
            column = FILENAME
        if column is not None:
            by_column.setdefault(column, []).append(value)
    comparisons = tuple(Comparison(column, operator, tuple(values)) for column, values in by_column.items())
    return AnyOf(comparisons) if len(comparisons) > 1 else comparisons[0] if comparisons else _NOTHING


def file_filter(store: str, file: str) -> Filter:
    """Return the filter for the passages of a file in a store."""
    return AllOf((Comparison(FILE, "eq", (file,)), Comparison(STORE, "eq", (store,))))
