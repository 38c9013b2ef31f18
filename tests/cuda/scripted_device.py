"""A device that implements the kernels' side of the memory layout without searching: a test sets how many extends a
query takes, and the result of a query is k times its slot.
"""

import ctypes
from typing import Any

import numpy as np

from gpu.cuda import layout
from tests.cuda.recorder import Launch, RecordingDriver


class ScriptedDevice:
    """Set `lengths[ticket]` for a query that takes other than `length` extends. `silent`: stop reporting progress."""

    def __init__(self, driver: RecordingDriver, length: int = 3) -> None:
        self.driver, self.length = driver, length
        self.lengths: dict[int, int] = {}
        self.silent = False
        self.covered: list[int] = []  # the bucket of each extend
        self._extends_of_launch = 0
        driver.on_launch = self.run

    def run(self, launch: Launch) -> None:
        batch = np.frombuffer(bytes(launch.arguments[0]), layout.BATCH)[0]
        if launch.kernel == "write_slots":
            self._write_slots(batch, int(launch.arguments[1].value), launch.grid.x)
        elif launch.kernel == "merge_and_gather":
            limit, condition = int(launch.arguments[1].value), int(launch.arguments[2].value)
            assert condition == launch.handle
            self._extend(batch, launch.grid.x, limit, condition)

    def slots(self, batch: Any) -> Any:
        """Return SLOT [slots]: the heads in device memory."""
        lines = self.driver.device(int(batch["slots"]), np.uint8, self._count(batch) * int(batch["line_bytes"]))
        return lines.reshape(-1, int(batch["line_bytes"]))[:, : layout.SLOT.itemsize].view(layout.SLOT)[:, 0]

    def _count(self, batch: Any) -> int:
        return self.driver.memory_of[int(batch["slots"])].nbytes // int(batch["line_bytes"])

    def _write_slots(self, batch: Any, commands: int, count: int) -> None:
        line_bytes = int(batch["line_bytes"])
        seen = set()
        for command in np.frombuffer(_pinned(commands, count * layout.COMMAND.itemsize), layout.COMMAND):
            slot = int(command["slot"])
            assert slot not in seen, "two commands for a slot in one launch"
            seen.add(slot)
            if command["line"]:
                target = self.driver.device(int(batch["slots"]) + slot * line_bytes, np.uint8, line_bytes)
                target[:] = np.frombuffer(_pinned(int(command["line"]), line_bytes), np.uint8)
            self.slots(batch)["status"][slot] = command["status"]

    def _extend(self, batch: Any, bucket: int, limit: int, condition: int) -> bool:
        """Run one extend. Return whether it is the launch's last."""
        self.covered.append(bucket)
        self._extends_of_launch += 1
        done = False
        for slot, head in enumerate(self.slots(batch)[:bucket]):
            if head["status"] != layout.ACTIVE:
                continue
            head["extends"] += 1
            line = _pinned(int(batch["results"]) + slot * int(batch["result_bytes"]), int(batch["result_bytes"]))
            result = np.frombuffer(line, layout.RESULT, 1)
            if head["extends"] >= self.lengths.get(int(head["ticket"]), self.length):
                k, most = int(head["k"]), int(batch["max_k"])
                np.frombuffer(line, np.int32, most, layout.RESULT.itemsize)[:k] = slot
                np.frombuffer(line, np.float32, most, layout.RESULT.itemsize + 4 * most)[:k] = slot
                head["status"] = layout.FINISHED
                result["extends"], result["ticket"] = head["extends"], head["ticket"]
                done = True
        rung = np.frombuffer(_pinned(int(batch["doorbell"]), 4), np.uint32)[0] != 0
        np.frombuffer(_pinned(int(batch["progress"]), 8), np.uint32)[1] += 1
        last = bool(done or rung or self._extends_of_launch == limit)
        if last:
            self._extends_of_launch = 0
            self.driver.conditions[condition] = 0
            if not self.silent:
                np.frombuffer(_pinned(int(batch["progress"]), 4), np.uint32)[0] += 1
        return last


def _pinned(address: int, nbytes: int) -> Any:
    return (ctypes.c_uint8 * nbytes).from_address(address)
