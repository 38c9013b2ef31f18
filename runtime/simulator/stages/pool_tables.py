"""Records of the simulated pools, for compiled code (`pool_core`)."""

from ipc.native.records import Array, Record, record, record_at
from runtime.pool.tables import Tables
from runtime.simulator.stages.schedule import Schedule


@record
class Query(Record):
    """A query in a pool, or on its way to or from it."""

    cancelled: bool
    waits: bool  # in its pool, for a slot
    stage: int
    group: int
    deadline_ns: int
    extends: int  # 0 until drawn
    top_m: int
    enqueued_ns: int
    begun_ns: int
    ended_ns: int
    pool: int
    entry: int  # of the policy
    status: int
    caller: int  # the row of a decode worker, or -1


@record
class Member(Record):
    """What the simulator knows of a policy's entry of the same number."""

    query: int
    last_step: int  # of the pool's extends; while paused: how many are left
    order: int  # of joining the batch


@record
class Gpu(Record):
    """A GPU that a model and a pool may share. While the model is busy, an extend takes `slowdown` times as long, and
    its unshared time is added to the model's next pass (time slicing). With one tenant (at most 1) there is no cost.
    """

    slowdown: float
    model_busy: bool
    debt_ns: int  # time of extends to be added to the model's next pass


@record
class Pool(Record):
    """A pool: its run of `steps` extends from `begin_ns`, the first of which takes `first_ns`, the others `each_ns`;
    and its counters."""

    number: int
    tables: Array[Tables]  # one
    members: Array[Member]  # by entry
    gpu: Array[Gpu]  # one
    waits: Array[float]  # prefill queries' waits for a slot, by bucket
    round_s: float
    query_s: float
    wake_ns: int  # from an arrival at an idle pool to its first extend
    planned: int  # number of the event that ends the run
    steps: int
    begin_ns: int
    first_ns: int
    each_ns: int
    shared: bool  # the run began while the model was busy
    idle: bool
    taken: int
    busy_ns: int
    member_steps: int
    admitted: int  # since the last run began
    joined: int
    waited_ns: int
    served: int
    queries: int


@record
class Group(Record):
    """Pools that serve queries in turn."""

    next: int
    count: int
    pools: Array[int]


@record
class State(Record):
    """All pools."""

    schedule: Array[Schedule]  # one
    capacity: int  # of queries
    queries: Array[Query]
    free_count: int
    free: Array[int]  # a stack
    pools: Array[Pool]
    groups: Array[Group]
    extend_s: Array[float]  # time of an extend by active slots
    drawn_count: int
    drawn: Array[int]  # extra extends of the next queries, drawn in advance
    drawn_used: int
    edge_count: int
    edges: Array[float]  # of the buckets of waits, in s
    ring_ns: int
    search_width: int
    min_extends: int


state_at = record_at(State)
