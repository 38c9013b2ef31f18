"""Fixture of emulated devices whose faults fail the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu.errors import DeviceError
from tests.cuda.emulation import EmulatedDriver, emulator

NewDriver = Callable[..., EmulatedDriver]


@pytest.fixture
def new_driver() -> Iterator[NewDriver]:
    """Return a factory of emulated devices. They are closed after the test; a fault that no call reported fails it."""
    drivers = []

    def make(seed: int = 0, block_threads: int = 64, program: Path | None = None) -> EmulatedDriver:
        drivers.append(EmulatedDriver(program or emulator(), seed, block_threads))
        return drivers[-1]

    yield make
    faults = []
    for driver in drivers:
        try:
            driver.close()
        except DeviceError as fault:
            faults.append(str(fault))
    assert not faults
