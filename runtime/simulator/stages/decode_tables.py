"""Records of all simulated decode workers, for compiled code (`step_batch`, `decode_core`)."""

from ipc.native.records import Array, Record, record, record_at
from runtime.simulator.stages.pool_tables import Gpu
from runtime.simulator.stages.schedule import Schedule, compiled


@record
class RowList(Record):
    """Rows of a worker, by number."""

    count: int
    rows: Array[int]


@record
class Row(Record):
    """A request of a decode worker."""

    worker: int
    steps: int  # that it joined the batch for
    ends: int  # the worker's `taken` when they are done, -1 outside the batch
    order: int  # of joining
    output: int  # tokens in all
    generated: int
    context: int  # tokens; in the batch, as of when it joined
    stall_ns: int  # stalled by probes, in all
    expired: bool
    probe: int  # number of its probe, 0 for none
    deadline_ns: int  # of the probe
    query: int  # the pool's, or -1
    status: int  # of the probe's answer


@record
class Worker(Record):
    """A worker and its batch, with a run of `steps` steps from `begin_ns` to `end_ns`, the first of which takes
    `first_ns`, the others `each_ns`; and its counters."""

    number: int
    end_ns: int
    steps: int
    begin_ns: int
    first_ns: int
    each_ns: int
    taken: int  # steps before the run
    idle: bool
    joined: int
    busy_ns: int
    context: int  # tokens of all rows in the batch
    extra_s: float  # time added to the next step
    tokens: int
    probes: int
    stalled: int  # rows that wait for a probe
    stall_ns: int
    counted_ns: int  # until when `stall_ns` counts
    embedded_ns: int  # when the last vector is ready
    callback: bool  # Python is called between every two runs (`decode`)
    gpu: Array[Gpu]  # with the pool on the same GPU, if any
    group: int  # of pools
    drawn: Array[float]  # random numbers for probe hits
    drawn_used: int
    appended: int  # passage tokens in the next step
    members: RowList  # in the batch
    joining: RowList  # about to join
    probing: RowList
    answered: RowList
    finished: RowList


@record
class Costs(Record):
    """Times of a step in ns; of a chunk in s."""

    step_ns: float
    row_ns: float
    context_token_ns: float
    chunk_token_s: float
    chunk_behind_s: float
    chunk_pair_s: float


@record
class State(Record):
    """All workers."""

    schedule: Array[Schedule]  # one
    costs: Costs
    worker_count: int
    workers: Array[Worker]
    slots: int  # of a worker
    rows: Array[Row]
    free_count: int
    free: Array[int]  # a stack of rows
    drawn_count: int  # random numbers of a worker
    probes_started: int
    probe_interval: int  # tokens between probes, 0 for none
    probes_enabled: bool
    probe_hit: float  # share of probes that find new passages
    probe_tokens: int  # of passages
    top_m: int
    most_steps: int  # of a run
    embed_ns: int
    timeout_ns: int  # of a probe


state_at = record_at(State)


@compiled
def append(rows: RowList, row: int) -> None:
    rows.rows[rows.count] = row
    rows.count += 1
