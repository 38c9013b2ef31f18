"""The filter of a search in clients' stores, which share a collection and assign its columns to their own names."""

from runtime.retrieval.attributes.filters import MAX_COMPARISONS, AllOf, AnyOf, Comparison, Filter, filter_bytes
from runtime.retrieval.stores.collection import store_filter

YEAR = Comparison("year", "eq", (2024,))


def in_column(column: str, *stores: str) -> Filter:
    store = Comparison("store", "in" if len(stores) > 1 else "eq", stores)
    return AllOf((Comparison(column, "eq", (2024,)), store))


def test_each_store_is_searched_by_the_columns_of_its_own_attributes() -> None:
    first, second = {"number:year": "number0"}, {"number:pages": "number0", "number:year": "number1"}
    wanted = store_filter({"vs_b": first, "vs_c": second, "vs_a": first}, YEAR)
    assert wanted == AnyOf((in_column("number0", "vs_a", "vs_b"), in_column("number1", "vs_c")))
    assert store_filter({"vs_c": second}, YEAR) == in_column("number1", "vs_c")
    assert store_filter({"vs_b": first, "vs_a": first}) == Comparison("store", "in", ("vs_a", "vs_b"))


def test_a_filter_counts_once_for_all_stores_with_the_same_columns() -> None:
    years = AnyOf(tuple(Comparison("year", "eq", (year,)) for year in range(MAX_COMPARISONS - 1)))
    filter_bytes(store_filter({f"vs_{number}": {"number:year": "number0"} for number in range(16)}, years))
