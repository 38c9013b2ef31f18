"""Tests of the imports of a node's processes: they dominated a worker's start-up time and a small one's memory."""

from collections.abc import Iterator

import pytest

from tests.fork_server import ForkServer

# Slow or large imports that only some processes need.
HEAVY = {
    "aiohttp", "fastapi", "gguf", "httpx", "jinja2", "matplotlib", "numba", "onnxruntime", "prometheus_client",
    "psutil", "pydantic", "rich", "safetensors", "scipy", "starlette", "sympy", "tokenizers", "torch",
    "transformers", "typer", "uvicorn", "zmq",
}  # fmt: skip

NEEDED = {
    "runtime.worker_process": set(),  # every worker before it receives its role
    "runtime.pool.process": {"numba", "zmq"},
    "runtime.serving.prefill.process": {"jinja2", "numba", "tokenizers", "zmq"},
    "runtime.serving.decode.process": {"jinja2", "numba", "tokenizers", "zmq"},
    "runtime.engines.frontend": {"numba", "pydantic", "starlette", "uvicorn", "zmq"},
    "runtime.serving.http.process": {"numba", "pydantic", "starlette", "uvicorn", "zmq"},
    "runtime.node.supervisor.supervisor": {"psutil", "zmq"},
    "runtime.checks.preflight": {"psutil"},
    "launchers.main": {"psutil", "typer", "zmq"},
}


@pytest.fixture(scope="module")
def bare() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def compiling() -> Iterator[ForkServer]:
    with ForkServer("numba", "zmq") as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def launcher() -> Iterator[ForkServer]:
    with ForkServer("launchers.main") as fork_server:
        yield fork_server


@pytest.mark.parametrize("module", NEEDED)
def test_a_process_imports_no_heavy_module_it_does_not_need(
    module: str, bare: ForkServer, compiling: ForkServer
) -> None:
    fork_server = compiling if NEEDED[module] >= {"numba", "zmq"} else bare
    assert HEAVY & _modules(fork_server, f"import {module}") <= NEEDED[module]


def test_loading_machine_code_does_not_import_what_numba_compiles_with(compiling: ForkServer) -> None:
    _modules(compiling, "import ipc.native.atomics")  # this one compiles if the cache is empty
    assert "numba.np.npyimpl" not in _modules(compiling, "import ipc.native.atomics")


@pytest.mark.parametrize("command", ["serve", "status", "stop"])
def test_a_command_does_not_import_modules_of_other_commands(command: str, launcher: ForkServer) -> None:
    found = _modules(launcher, f"from launchers.main import command_line; command_line([{command!r}])")
    others = ("demo", "config", "index", "dashboards", "simulate", "trace")
    assert not {f"launchers.commands.{name}" for name in others} & found


def test_help_shows_every_command(launcher: ForkServer) -> None:
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


def _modules(fork_server: ForkServer, program: str) -> set[str]:
    """Return the modules that a process has imported after `program`."""
    run = fork_server.run("-c", f"{program}\nimport sys\nprint(*sys.modules)")
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())
