"""Whole numbers on their way to a device: all lists of one batch in one copy that nobody waits for."""

from collections.abc import Iterable

import torch


class Uploads:
    """`add` lists, `send` them once, and take them out as views of one int64 tensor."""

    def __init__(self) -> None:
        self._values: list[int] = []

    def add(self, values: Iterable[int]) -> slice:
        """Where in what `send` returns these values will be."""
        begin = len(self._values)
        self._values += values
        return slice(begin, len(self._values))

    def send(self, device: torch.device) -> torch.Tensor:
        """All that was added, on the device. A copy from pageable memory would wait for the device's whole queue."""
        values = torch.tensor(self._values, dtype=torch.int64)
        if device.type == "cpu":
            return values
        return values.pin_memory().to(device, non_blocking=True)
