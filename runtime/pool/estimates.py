"""Estimates of the policy: extends of a query class, cost of an extend.

- Ê: extends of a query class, a running mean over completed queries. The prior of a new class follows CAGRA's rule:
  every entry of top_m is expanded, and a few more.
- T_ext(a): cost of an extend with `a` active slots, a line `fixed + each·a` in ns, by least squares over the last few
  hundred with exponential forgetting. On a GPU `each` is about 0 until saturation, on a CPU it is nearly everything.
  Before the first extend both are 0, and only slots count.
"""

from runtime.pool.compiled import compiled
from runtime.pool.tables import MAX_CLASSES, CostModel, Entry, QueryClass, Tables

_MEMORY = 64.0  # queries after which an old one has weight 1/e
_EXTENDS = 256.0  # extends after which an old one has weight 1/e
_INERTIA = 16.0  # slots²: the variance of active slots needed to change the ratio of fixed to per-slot cost
_OUTLIER = 4.0  # an extend's cost is clipped to this many times the expected one


@compiled
def class_of(t: Tables, entry: Entry) -> int:
    """Return the number of an entry's query class, adding a new one. The table is reset when three quarters full."""
    if t.class_count > 3 * MAX_CLASSES // 4:
        for number in range(MAX_CLASSES):
            t.classes[number].used = False
        t.class_count = 0
    key = entry.scope * 13 + entry.top_m * 31 + entry.search_width * 7 + entry.patience
    number = key % MAX_CLASSES
    query_class = t.classes[number]
    while query_class.used:
        if (
            query_class.scope == entry.scope
            and query_class.top_m == entry.top_m
            and query_class.search_width == entry.search_width
            and query_class.patience == entry.patience
        ):
            return number
        number = (number + 1) % MAX_CLASSES
        query_class = t.classes[number]
    query_class.used, query_class.scope, query_class.top_m = True, entry.scope, entry.top_m
    query_class.search_width, query_class.patience = entry.search_width, entry.patience
    query_class.mean_extends, query_class.queries = entry.top_m / max(entry.search_width, 1) + 3.0, 0.0
    t.class_count += 1
    return number


@compiled
def learn_extends(query_class: QueryClass, extends: int) -> None:
    """Update a class's mean with a completed query."""
    query_class.queries = count = min(query_class.queries + 1.0, _MEMORY)
    query_class.mean_extends = (
        extends if count == 1.0 else query_class.mean_extends + (extends - query_class.mean_extends) / count
    )


@compiled
def extend_ns(cost: CostModel, active: float) -> float:
    """Return T_ext(active)."""
    return cost.fixed_ns + cost.each_ns * active


@compiled
def learn_cost(cost: CostModel, active: float, took_ns: float) -> None:
    """Update the cost model with an extend of `active` slots (of several extends: the mean)."""
    expected = extend_ns(cost, active)
    if cost.count > 8 and expected > 0.0:
        took_ns = min(took_ns, _OUTLIER * expected)  # the process was descheduled
    cost.count = min(cost.count + 1.0, _EXTENDS)
    weight = 1.0 / cost.count
    cost.mean_active += (active - cost.mean_active) * weight
    cost.mean_ns += (took_ns - cost.mean_ns) * weight
    cost.mean_active_squared += (active * active - cost.mean_active_squared) * weight
    cost.mean_active_ns += (active * took_ns - cost.mean_active_ns) * weight
    mean, total = cost.mean_active, cost.mean_ns
    # With little variance in active slots the line keeps its shape (the ratio of its parts) and is only scaled: the
    # machine has become faster or slower then.
    each, known = cost.each_ns, extend_ns(cost, mean)
    shaped = each * total / known if each > 0.0 and known > 0.0 else 0.0
    each = (cost.mean_active_ns - mean * total + _INERTIA * shaped) / (
        cost.mean_active_squared - mean * mean + _INERTIA
    )
    cost.each_ns = min(max(each, 0.0), total / mean)
    cost.fixed_ns = total - cost.each_ns * mean
