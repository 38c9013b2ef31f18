"""What each kernel of an extend takes on the device, by events around it: for measuring, not for serving.

The kernels are launched one by one, not replayed, so what lies between two of them is no part of their times.
"""

from dataclasses import dataclass
from itertools import pairwise

from gpu.cuda.batch import BatchMemory
from gpu.cuda.driver import Driver
from gpu.cuda.graphs import Kernels


@dataclass(frozen=True)
class StageTimes:
    """One extend: seconds by kernel, the slots that it advanced, and the rows that these were compared with."""

    seconds: dict[str, float]
    slots: int
    rows: int


def time_stages(driver: Driver, stream: int, kernels: Kernels, memory: BatchMemory, fused: bool) -> StageTimes:
    """Make one extend of all slots that are active on the device, in three kernels or, `fused`, in one. Synchronises.

    Raises DeviceError.
    """
    before = memory.device_heads()
    bucket = len(before)
    if fused:
        kernels.load_fused(1)
    stages = (kernels.fused_stage(bucket),) if fused else kernels.stages(bucket)
    events = [driver.create_event() for _ in range(len(stages) + 1)]
    try:
        driver.record(stream, events[0])
        for stage, event in zip(stages, events[1:], strict=True):
            kernels.launch(stream, stage)
            driver.record(stream, event)
        driver.synchronise(stream)
        took = [driver.elapsed_ms(begin, end) / 1e3 for begin, end in pairwise(events)]
    finally:
        for event in events:
            driver.destroy_event(event)
    after = memory.device_heads()
    advanced = (after["ticket"] == before["ticket"]) & (after["extends"] != before["extends"])
    # Where a slot's block keeps its tasks to itself, how many there were is not known.
    rows = 0 if fused else int((after["task_end"] - after["task_begin"])[advanced].sum())
    names = [stage.name for stage in stages]
    return StageTimes(dict(zip(names, took, strict=True)), int(advanced.sum()), rows)
