"""What each process of a node does not import: imports were most of a worker's start, and of a small one's memory."""

from collections.abc import Iterator

import pytest

from tests.warm import Warm

# Slow to import, or large: what only some processes need.
HEAVY = {
    "aiohttp", "fastapi", "gguf", "httpx", "jinja2", "matplotlib", "numba", "onnxruntime", "prometheus_client",
    "psutil", "pydantic", "rich", "safetensors", "scipy", "starlette", "sympy", "textual", "tokenizers", "torch",
    "transformers", "typer", "uvicorn", "zmq",
}  # fmt: skip

NEEDED = {
    "runtime.node.worker": set(),  # every worker, before it knows its role
    "runtime.pool.process": {"numba", "zmq"},
    "runtime.serving.prefill.process": {"jinja2", "numba", "tokenizers", "zmq"},
    "runtime.serving.decode.process": {"jinja2", "numba", "tokenizers", "zmq"},
    "runtime.engines.frontend": {"numba", "pydantic", "starlette", "uvicorn", "zmq"},
    "runtime.serving.http.process": {"numba", "pydantic", "starlette", "uvicorn", "zmq"},
    "runtime.node.supervisor.supervisor": {"prometheus_client", "psutil", "zmq"},
    "runtime.checks.preflight": {"prometheus_client", "psutil"},
    "launchers.main": {"prometheus_client", "psutil", "rich", "typer", "zmq"},
}


@pytest.fixture(scope="module")
def bare() -> Iterator[Warm]:
    with Warm() as warm:
        yield warm


@pytest.fixture(scope="module")
def compiling() -> Iterator[Warm]:
    with Warm("numba", "zmq") as warm:
        yield warm


@pytest.fixture(scope="module")
def launcher() -> Iterator[Warm]:
    with Warm("launchers.main") as warm:
        yield warm


@pytest.mark.parametrize("module", NEEDED)
def test_a_process_imports_what_it_needs_and_nothing_else_that_is_heavy(
    module: str, bare: Warm, compiling: Warm
) -> None:
    warm = compiling if NEEDED[module] >= {"numba", "zmq"} else bare
    assert HEAVY & _modules(warm, f"import {module}") <= NEEDED[module]


@pytest.mark.parametrize("command", ["serve", "status", "stop"])
def test_a_command_imports_no_other_command_s_module(command: str, launcher: Warm) -> None:
    found = _modules(launcher, f"from launchers.main import command_line; command_line([{command!r}])")
    others = ("demo", "config", "index", "dashboards", "simulate", "trace")
    assert not {f"launchers.commands.{name}" for name in others} & found


def test_help_shows_every_command(launcher: Warm) -> None:
    run = launcher.run("-c", "from launchers.main import main; main()", "--help")
    assert run.returncode == 0, run.stderr
    for command in (
        "index",
        "search",
        "serve",
        "status",
        "demo",
        "doctor",
        "simulate",
        "dashboards",
        "workers",
        "logs",
    ):
        assert f" {command} " in run.stdout


def _modules(warm: Warm, program: str) -> set[str]:
    """What a process has imported when it has run `program`."""
    run = warm.run("-c", f"{program}\nimport sys\nprint(*sys.modules)")
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())
