"""Records of the CUDA engine's state on the host, for its C functions (`gpu.cuda.backend`, `gpu.cuda.resident`)."""

from typing import Annotated

from gpu.cpu.tables import Collection, Encoding, Slot
from gpu.cuda.layout import Command, Progress, SlotRecord
from ipc.native.records import Array, Record, SharedU32, record, record_at


@record
class ResidentSlot(Record):
    """What the resident form knows of a slot."""

    on_device: bool  # the device owns it
    done: bool  # it has a result
    prioritized: bool  # it uses the prefill ring
    in_queue: bool  # of `Resident.queue`
    new: int  # the flags of its entry until the device has the slot's line, then 0
    reached: int  # extends of its query so far
    place: int  # its index among the active slots


@record
class Resident(Record):
    """The state of the resident form."""

    rings: Array[SharedU32]  # in pinned memory (`layout`), with `entries` in each ring and among the records
    goals: Array[SharedU32]  # by slot
    records: Array[SlotRecord]
    entries: int
    running: bool  # a launch is running
    in_flight: int  # slots owned by the device
    pushed: Annotated[Array[int], 2]  # entries so far, by ring
    seen: int  # records consumed so far
    advanced: int  # extends of single slots that are not reported yet
    queue: Array[int]  # slots that the next `extend` looks at
    queued: int
    finished: Array[int]  # slots with results to be reported, some of which may have been paused or released since
    finished_count: int
    scans: bool  # the host may have slots to scan


@record
class Graph(Record):
    """A CUDA graph that extends the slots before `bucket`."""

    bucket: int
    graph: int


@record
class Host(Record):
    """The engine's handle is the address of this record."""

    table: int  # address of the slots' states
    active: int  # address of its list of active slots, int32
    slots: int
    encodings: Array[Encoding]  # by collection
    ids: Array[int]  # by collection: an address, 0 where row numbers are the ids
    collections: Array[Collection]  # of `gpu.cuda.filtered.HostScans`, as the next two
    searches: Array[Slot]
    keys: int  # address
    lines: int  # addresses of the staged slot lines for the host and for the device
    device_lines: int
    line_bytes: int
    commands: Array[Command]
    pending: int  # commands of the next launch
    places: Array[int]  # by slot: 1 + the index of its command, 0 without one
    results: int  # addresses in pinned memory
    result_bytes: int
    max_k: int
    progress: Array[Progress]  # one
    doorbell: Array[SharedU32]  # one
    graphs: Array[Graph]  # smallest bucket first
    limit: int  # extends of a launch
    stream: int
    replay: int  # the driver's entry points
    launch: int
    query: int
    write: int  # the kernel `write_slots`
    arguments: int  # address of its arguments' addresses
    resident: Resident
    slot_states: Array[ResidentSlot]
    interrupt: int  # callback polled during a launch of several extends; 0 for none
    interrupt_argument: int
    poll_ns: int  # interval at which a wait polls the driver for errors
    poll_at_ns: int
    timeout_ns: int  # of a wait
    next_ticket: int
    launches: int  # so far
    total_extends: int
    extends: int  # of the last launch
    waited_ns: int  # in all
    failure: int  # its kind (`gpu.cuda.backend`)
    code: int


host_at = record_at(Host)
