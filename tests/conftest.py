"""Options of the test command, layers of tests, coroutines as tests, and the number of parallel test processes."""

import asyncio
import contextlib
import gc
import inspect
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # ships no types

from runtime.errors import ModelError
from runtime.serving.model.cache import private_cache
from tests.fuzz import budget
from tests.layers import ORDER, layer_of, parallel_places, share_of

_COROUTINE_S = 240.0  # less than the timeout of a test, which shows no task
# Threads of numpy (not imported by any conftest yet) and of torch spin while they wait for each other, on cores that
# other tests use.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 4 << 30
# The time of an example depends on the machine more than on the code; pytest's own timeout ends hangs.
settings.register_profile("any machine", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def _use_memory_for_files() -> None:
    """Put temporary files into memory where there is room: thousands of tests wait for their files to be on disk."""
    with contextlib.suppress(OSError, ModelError):  # there is none, or no home directory
        found = os.statvfs(_MEMORY)
        if found.f_bavail * found.f_frsize >= _ROOM_BYTES and not found.f_flag & os.ST_NOEXEC:
            tempfile.tempdir = os.environ.setdefault("TMPDIR", str(_MEMORY))  # which pytest has asked for already
            # Torch's programs would be there, too; they are kept, as those of a node.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_cache("torch", "compiler cache")))


_use_memory_for_files()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-examples", type=int, default=budget.USUAL, help="examples that each test of tests/fuzz tries"
    )
    parser.addoption(
        "--kills",
        type=int,
        default=4,
        help="how often tests/collections/test_kill.py and tests/e2e/test_writes.py kill",
    )
    parser.addoption("--fleet-rounds", type=int, default=1, help="how often tests/e2e/test_fleet.py replaces two nodes")


def pytest_configure(config: pytest.Config) -> None:
    budget.examples = config.getoption("--fuzz-examples")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the processes of `-n auto`: one per core, one more if tests wait for others, none in a debugger."""
    more = 0 if _only_layer(config) == "unit" else 1
    return 0 if config.getoption("usepdb") else min(len(os.sched_getaffinity(0)) + more, 8)


class _ByFile(LoadFileScheduling):  # type: ignore[misc]
    """The tests of a file run in one process, with its fixtures; so do all that share a node or transformers."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files of other layers with `-m unit`, `-m "not nodes"` and the like: importing them takes longer than many
    tests."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    layer = layer_of(collection_path.relative_to(config.rootpath).as_posix())
    return config.getoption("markexpr") == f"not {layer}" or _only_layer(config) not in ("", layer) or None


def _only_layer(config: pytest.Config) -> str:
    """Return the one selected layer, or ""."""
    marker: str = config.getoption("markexpr")
    return marker if marker in ORDER else ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze imported objects, which stay, so that the garbage collector does not traverse them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own; fail it after `_COROUTINE_S`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), _COROUTINE_S))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape captured logs: they are sent to another process as UTF-8, and some tests log invalid UTF-8."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        layer = layer_of(item.nodeid)
        item.add_marker(layer)
        if layer in ("nodes", "e2e") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))  # whole nodes, in parallel, on a busy machine
        if budget.examples > budget.USUAL and "tests/fuzz/" in item.nodeid:
            item.add_marker(pytest.mark.timeout(0))  # long runs have no timeout
    if hasattr(config, "workerinput"):
        places = parallel_places(item.nodeid for item in items)
        items.sort(key=lambda item: places[share_of(item.nodeid)])
