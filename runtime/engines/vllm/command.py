"""What is run: vLLM's API server, by the interpreter that the configuration names."""

import itertools
import os
import re
import subprocess
from collections.abc import Sequence

from runtime.errors import ConfigError
from runtime.node.config import VllmSection
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.serving.model import smollm

OLDEST = (0, 20)
"""Of the versions whose options and answers are relied upon here; tried was 0.32."""

_SHARE = 0.92  # of vLLM 0.32; 0.9 of those before
_SERVER = "vllm.entrypoints.openai.api_server"
_LOOK_S = 60.0  # for an interpreter's start on a busy machine
# `importlib.metadata` alone: importing vLLM takes half a minute. Builds by others have names of their own.
_VERSION = """
from importlib.metadata import packages_distributions, version
found = packages_distributions().get("vllm")
print(version(found[0]) if found else "")
"""
_OURS = ("--model", "--served-model-name", "--uds", "--host", "--port", "--tensor-parallel-size", "-tp",
         "--pipeline-parallel-size", "-pp", "--max-model-len", "--api-key", "--ssl-keyfile")  # fmt: skip
_UNWANTED = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")  # a worker's own: vLLM counts its threads itself


def version(section: VllmSection) -> str:
    """The installed version. Raises `ConfigError` without one, or for one that is too old."""
    try:
        found = subprocess.run([section.python, "-c", _VERSION], capture_output=True, text=True, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"model.python = {section.python!r} cannot be run: {error}") from error
    told = found.stdout.strip()
    if found.returncode or not told:
        raise ConfigError(
            f"model.python = {section.python!r}: vLLM is not installed there: `{section.python} -m pip install vllm`, "
            "or give the interpreter of the environment that has it"
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", told)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"vLLM {told} at model.python = {section.python!r} is too old: {oldest} or later is needed")
    return told


def check_arguments(section: VllmSection) -> None:
    """Raises `ConfigError` for an extra argument that is the node's own to give."""
    for argument in section.extra_args:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _OURS:
            raise ConfigError(f"model.extra_args: {argument!r} is the node's own to say: it follows from [model]")


def gpu_memory_share(section: VllmSection) -> float:
    """The share of each GPU's memory that vLLM takes: as its arguments say, or by its own default."""
    name = "--gpu-memory-utilization"
    given = [argument.partition("=")[2] for argument in section.extra_args if argument.startswith(f"{name}=")]
    given += [value for argument, value in itertools.pairwise(section.extra_args) if argument == name]
    try:
        return float(given[-1]) if given else _SHARE
    except ValueError:
        raise ConfigError(f"model.extra_args: {name} {given[-1]!r} is no number") from None


def command(section: VllmSection, plan: NodePlan, place: WorkerPlan) -> Sequence[str]:
    """The command of an instance. Raises `ModelError` for a packaged model that cannot be converted."""
    loads = section.loads
    if loads == smollm.NAME:
        loads = str(smollm.ensure_converted())
    options = ["--model", loads, "--served-model-name", section.name, "--uds", plan.engine_socket(place.name)]
    options += ["--tensor-parallel-size", str(section.tensor_parallel_size)]
    options += ["--pipeline-parallel-size", str(section.pipeline_parallel_size)]
    options += ["--disable-uvicorn-access-log"]  # a line for every request, and for every look at /health
    if section.context_tokens:
        options += ["--max-model-len", str(section.context_tokens)]
    return [section.python, "-m", _SERVER, *options, *section.extra_args]


def environment(section: VllmSection, place: WorkerPlan) -> dict[str, str]:
    """The environment of an instance's processes."""
    kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    numbered = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if place.gpu_numbers else {}
    return kept | numbered | section.environment
