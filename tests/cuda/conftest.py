"""The emulated device is built once a run; without g++ its tests are skipped, but never in CI."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu.errors import DeviceError
from tests.cuda.emulation import EmulatedDriver, build, missing_compiler

NewDriver = Callable[..., EmulatedDriver]


@pytest.fixture(scope="session")
def compiler() -> None:
    reason = missing_compiler()
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, so no kernel would run in CI")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def emulator(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def new_driver(emulator: Path) -> Iterator[NewDriver]:
    """Makes emulated devices; those that are still open are closed at the end, and any fault fails the test."""
    drivers = []

    def make(seed: int = 0, block_threads: int = 64) -> EmulatedDriver:
        drivers.append(EmulatedDriver(emulator, seed, block_threads))
        return drivers[-1]

    yield make
    faults = []
    for driver in drivers:
        try:
            driver.close()
        except DeviceError as fault:
            faults.append(str(fault))
    assert not faults
