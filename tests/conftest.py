"""Options of the test command, the layers of tests, and how many run side by side."""

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz import budget
from tests.layers import ORDER, layer_of

# Threads of numpy, which no conftest has imported yet, and of torch spin while they wait for each other, and other
# tests run on the cores beside this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says more of the machine than of the code: pytest's own limit ends what hangs.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-examples", type=int, default=budget.USUAL, help="examples that each test of tests/fuzz tries"
    )
    parser.addoption("--kills", type=int, default=4, help="how often tests/live/test_kill.py kills a writer")
    parser.addoption("--fleet-rounds", type=int, default=1, help="how often tests/e2e/test_fleet.py replaces two nodes")


def pytest_configure(config: pytest.Config) -> None:
    budget.examples = config.getoption("--fuzz-examples")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: one process a core, and one more where tests wait for others; none where a debugger is."""
    more = 0 if _only_layer(config) == "unit" else 1
    return 0 if config.getoption("usepdb") else min(len(os.sched_getaffinity(0)) + more, 8)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m unit` and the like no file of another layer is imported: that takes longer than many tests."""
    only = _only_layer(config)
    if only and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return layer_of(collection_path.relative_to(config.rootpath).as_posix()) != only or None
    return None


def _only_layer(config: pytest.Config) -> str:
    """The one layer that is asked for, or ""."""
    marker: str = config.getoption("markexpr")
    return marker if marker in ORDER else ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: the garbage collector need not look through it again and again, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What tests log goes to another process, which takes UTF-8 alone; some log what is none."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        layer = layer_of(item.nodeid)
        item.add_marker(layer)
        if layer == "e2e" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))  # whole nodes, side by side, on a machine that others keep busy
        if budget.examples > budget.USUAL and "tests/fuzz/" in item.nodeid:
            item.add_marker(pytest.mark.timeout(0))  # the long form takes as long as it takes
    if hasattr(config, "workerinput"):  # side by side: what takes long begins first, or the end waits for it alone
        items.sort(key=lambda item: ORDER.index(layer_of(item.nodeid)))
