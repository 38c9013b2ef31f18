"""What the policy learns as it goes: how many extends a query takes, and how long an extend takes. Compiled.

- Ê: the extends of queries that ask alike, a running mean over those that finished. One not seen yet is assumed to
  follow CAGRA's rule: every entry of top_m is expanded, and a few more.
- T_ext(a): an extend with `a` active slots, as a line `fixed + each·a` in ns, by least squares over the last few
  hundred, older ones forgotten exponentially. On a GPU `each` is about 0 until it saturates, on a CPU it is nearly
  everything. Before the first extend all is 0, and only slots count.
"""

from typing import Any

import numpy as np

from runtime.pool.compiled import compiled
from runtime.pool.tables import COST_A, COST_AA, COST_AT, COST_COUNT, COST_T, EACH_NS, FIXED_NS, KINDS, KINDS_KNOWN

_MEMORY = 64.0  # queries after which an old one counts for 1/e
_EXTENDS = 256.0  # the same of extends
_INERTIA = 16.0  # slots², how much spread it takes to change what is fixed in proportion to what is not
_OUTLIER = 4.0  # an extend that took longer than this many times what was expected counts as that long


@compiled
def kind_a(collection: int, top_m: int) -> Any:
    """The first word of what queries that ask alike have in common."""
    return (np.int64(collection) + 1) << 32 | np.int64(top_m)


@compiled
def kind_b(width: int, patience: int) -> Any:
    """The second one."""
    return np.int64(width) << 32 | np.int64(patience)


@compiled
def row_of_kind(tables: Any, a: int, b: int) -> Any:
    """The row of estimates for queries that ask so; made if there is none."""
    if tables.words[KINDS_KNOWN] > 3 * KINDS // 4:
        tables.kinds[:] = 0
        tables.words[KINDS_KNOWN] = 0
    row = (a * 31 + (a >> 32) * 17 + b * 7 + (b >> 32)) % KINDS
    while tables.kinds[row, 0] != 0:
        if tables.kinds[row, 0] == a and tables.kinds[row, 1] == b:
            return row
        row = (row + 1) % KINDS
    tables.kinds[row, 0], tables.kinds[row, 1] = a, b
    tables.means[row, 0] = (a & 0xFFFFFFFF) / max(b >> 32, 1) + 3.0
    tables.means[row, 1] = 0.0
    tables.words[KINDS_KNOWN] += 1
    return row


@compiled
def learn_extends(tables: Any, row: int, extends: int) -> None:
    """A query of a kind took so many."""
    count = min(tables.means[row, 1] + 1.0, _MEMORY)
    tables.means[row, 1] = count
    tables.means[row, 0] = extends if count == 1.0 else tables.means[row, 0] + (extends - tables.means[row, 0]) / count


@compiled
def extend_ns(tables: Any, active: float) -> Any:
    """T_ext(active)."""
    return tables.floats[FIXED_NS] + tables.floats[EACH_NS] * active


@compiled
def learn_cost(tables: Any, active: float, took_ns: float) -> None:
    """An extend of `active` slots (of several, their mean) took so long."""
    cost = tables.floats
    expected = extend_ns(tables, active)
    if cost[COST_COUNT] > 8 and expected > 0.0:
        took_ns = min(took_ns, _OUTLIER * expected)  # the process lost its core for a while
    cost[COST_COUNT] = min(cost[COST_COUNT] + 1.0, _EXTENDS)
    weight = 1.0 / cost[COST_COUNT]
    cost[COST_A] += (active - cost[COST_A]) * weight
    cost[COST_T] += (took_ns - cost[COST_T]) * weight
    cost[COST_AA] += (active * active - cost[COST_AA]) * weight
    cost[COST_AT] += (active * took_ns - cost[COST_AT]) * weight
    mean, total = cost[COST_A], cost[COST_T]
    # The less the numbers of active slots differed, the more the line keeps its shape: what has changed then is how
    # fast the machine is.
    each, known = cost[EACH_NS], extend_ns(tables, mean)
    shaped = each * total / known if each > 0.0 and known > 0.0 else 0.0
    each = (cost[COST_AT] - mean * total + _INERTIA * shaped) / (cost[COST_AA] - mean * mean + _INERTIA)
    cost[EACH_NS] = min(max(each, 0.0), total / mean)
    cost[FIXED_NS] = total - cost[EACH_NS] * mean
