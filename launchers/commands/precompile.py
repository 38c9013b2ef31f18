"""`trinity precompile`: compile everything that a node compiles at its first start, into the caches."""

import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import typer

from gpu.errors import GpuError
from ipc.native.compiled import can_cache
from runtime.errors import ConfigError, TrinityError, UsageError
from runtime.node.config import Role
from runtime.node.config_file import load_config
from runtime.node.placement.layout import lay_out
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.collections import bulk_load
from runtime.worker_process import loop_of


def precompile(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Also compile the kernels for this GPU architecture, such as sm_90; repeatable."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Also compile what torch compiles for this configuration's model on its GPUs.")
    ] = None,
) -> None:
    """Compile the search engine, the pool's loop, the GPU kernels and Trinity's modules into this user's caches.

    For images and environments: a node of the same user on the same kind of processor then starts without compiling.
    The kernels are compiled for this machine's GPUs and the named architectures.
    """
    if not can_cache():
        raise ConfigError("compiled code cannot be cached: set NUMBA_CACHE_DIR to a directory of this user")
    has_cuda = importlib.util.find_spec("cuda") is not None
    _check_architectures(arch or [], has_cuda)
    machine = Machine.read()
    plan = lay_out(load_config(config), machine) if config else None
    _timed("modules", _modules)
    _timed("search engine and pool", _pool)
    if importlib.util.find_spec("torch"):
        _timed("model on CPUs", lambda: importlib.import_module("runtime.serving.network.llama"))
    if has_cuda:
        _timed("search engine on GPUs", _cuda_engine)
        for name in dict.fromkeys([*(arch or ()), *(gpu.arch for gpu in machine.gpus if gpu.arch)]):
            _timed(f"kernels for {name}", partial(_kernels, name))
    if config and plan:
        _models(config, plan, machine)


def _check_architectures(names: Sequence[str], has_cuda: bool) -> None:
    """Raise UsageError for architectures for which no kernels can be compiled."""
    if names and not has_cuda:
        raise UsageError("--arch needs the extra [cuda]: pip install 'trinity-runtime[cuda]'")
    for name in names:
        from gpu.cuda.compiler import check_architecture

        try:
            check_architecture(name)
        except GpuError as error:
            raise UsageError(f"--arch: {error}") from error


def _timed(what: str, compile_: Callable[[], object]) -> None:
    begin = time.monotonic()
    compile_()
    print(f"{what}: {time.monotonic() - begin:.1f} s", flush=True)


def _modules() -> None:
    """Import what workers of every role import, for Python's caches."""
    for role in get_args(Role):
        loop_of(role)


def _pool() -> None:
    """Start a pool on the CPU, over rows of each data type, without serving."""
    from runtime.pool.loop_parts import compiled_in_background

    with compiled_in_background(), tempfile.TemporaryDirectory() as folder:
        from gpu.index.rows import DTYPES, METRICS
        from runtime.testing.pool import InProcessPool, plan_of

        vectors = np.random.default_rng(0).normal(size=(400, 32)).astype(np.float32)
        paths = [Path(folder) / f"{metric}-{dtype}" for metric in METRICS for dtype in DTYPES]
        for path, (metric, dtype) in zip(paths, itertools.product(METRICS, DTYPES), strict=True):
            bulk_load.build(vectors, path, metric=metric, dtype=dtype, degree=16)  # type: ignore[arg-type]
        pool = InProcessPool(plan_of(paths[0], *({"name": path.name, "path": str(path)} for path in paths[1:])))
    pool.close()
    pool.worker.table.close()
    pool.table.close()


def _cuda_engine() -> None:
    """Compile the host's part of every form."""
    from gpu.compiled import compile_c_functions
    from gpu.cuda import backend, resident

    compile_c_functions(backend, resident)


def _kernels(arch: str) -> None:
    from gpu.cuda.block_copy import compile_block_copy
    from gpu.cuda.compiler import compile_kernels

    try:
        compile_kernels(arch)
        compile_block_copy(arch)
    except GpuError as error:
        raise ConfigError(str(error)) from error


def _models(config: Path, plan: NodePlan, machine: Machine) -> None:
    """Compile the model once for each kind of GPU and role, in a process that sees what the worker sees."""
    if plan.config.own_model is None:
        return
    kinds, seen = {gpu.uuid: gpu.name for gpu in machine.gpus}, {""}
    for role in ("decode", "prefill"):
        for worker in plan.of_role(role):
            what = f"{role} on {kinds[worker.gpu]}" if worker.gpu in kinds and not worker.only_embeds_on_gpu else ""
            if what not in seen:
                seen.add(what)
                command = [sys.executable, "-m", "launchers.commands.precompile", str(config), role, worker.device]
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": worker.visible_devices or ""}
                _timed(what, partial(_run, command, environment))


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    if code := subprocess.run(command, env=environment, check=False).returncode:
        raise typer.Exit(code)


def compile_model(config: Path, role: Literal["prefill", "decode"], device: str) -> int:
    """Compile what torch compiles for a worker of this role on `device`. Return the exit code."""
    from runtime.serving.kv.transport import transport_for
    from runtime.serving.model.compilation import ModelSetup, compile_programs

    try:
        return 0 if compile_programs(ModelSetup.of(load_config(config), role, transport_for(device))) else 1
    except TrinityError as error:
        print(f"trinity: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(compile_model(Path(sys.argv[1]), "decode" if sys.argv[2] == "decode" else "prefill", sys.argv[3]))
