"""What is run: vLLM's API server, by the interpreter that the configuration names."""

import itertools
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.engines.vllm.transfer import transfer_config, transfer_environment
from runtime.errors import ConfigError
from runtime.node.engine_config import Stage, VllmSection
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.serving.model import smollm

OLDEST = (0, 20)
"""Of the versions whose options and answers are relied upon here; tried was 0.32."""

_SHARE = 0.92  # of vLLM 0.32; 0.9 of those before
_SERVER = "vllm.entrypoints.openai.api_server"
_LOOK_S = 60.0  # for an interpreter's start on a busy machine
# `importlib.metadata` alone: importing vLLM takes half a minute. Builds by others have names of their own.
_LOOK = """
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
found = packages_distributions().get("vllm")
print(version(found[0]) if found else "", "nixl" if find_spec("nixl") or find_spec("rixl") else "")
"""
_OURS = ("--model", "--served-model-name", "--uds", "--host", "--port", "--tensor-parallel-size", "-tp",
         "--pipeline-parallel-size", "-pp", "--max-model-len", "--api-key", "--ssl-keyfile")  # fmt: skip
_TRANSFER = "--kv-transfer-config"
_CPU_BLOCK_TOKENS = "32"  # the least that it takes on a CPU: what a probe computes again is the unfinished block of KV
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_UNWANTED = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")  # a worker's own: vLLM counts its threads itself


@dataclass(frozen=True, slots=True)
class Installed:
    """vLLM's version; whether NIXL is there beside it."""

    version: str
    nixl: bool


def installed(section: VllmSection) -> Installed:
    """What is there. Raises `ConfigError` without vLLM, or for one that is too old."""
    try:
        found = subprocess.run([section.python, "-c", _LOOK], capture_output=True, text=True, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"model.python = {section.python!r} cannot be run: {error}") from error
    told, _, nixl = found.stdout.strip().partition(" ")
    if found.returncode or not told:
        raise ConfigError(
            f"model.python = {section.python!r}: vLLM is not installed there: `{section.python} -m pip install vllm`, "
            "or give the interpreter of the environment that has it"
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", told)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"vLLM {told} at model.python = {section.python!r} is too old: {oldest} or later is needed")
    return Installed(told, bool(nixl))


def check_arguments(section: VllmSection) -> None:
    """Raises `ConfigError` for an extra argument that is the node's own to give."""
    ours = (*_OURS, _TRANSFER) if section.prefill is not None else _OURS
    lists = [("model", section.extra_args)]
    lists += [(f"model.{name}", stage.extra_args) for name, stage in section.stages.items() if name]
    for key, argument in ((key, argument) for key, arguments in lists for argument in arguments):
        if argument.partition("=")[0].replace("_", "-") in ours:
            raise ConfigError(f"{key}.extra_args: {argument!r} is the node's own to say: it follows from [model]")


def option(section: VllmSection, stage: Stage, name: str) -> str:
    """The value of one of vLLM's options in the extra arguments of a stage; "" if it is not among them."""
    arguments = (*section.extra_args, *section.stages[stage].extra_args)
    told = [
        value if argument == name else argument.partition("=")[2]
        for argument, value in itertools.pairwise((*arguments, ""))
        if argument == name or argument.startswith(f"{name}=")
    ]
    return told[-1] if told else ""


def gpu_memory_share(section: VllmSection, stage: Stage = "") -> float:
    """The share of each GPU's memory that vLLM takes: as its arguments say, or by its own default."""
    given = option(section, stage, "--gpu-memory-utilization")
    try:
        return float(given) if given else _SHARE
    except ValueError:
        raise ConfigError(f"model.extra_args: --gpu-memory-utilization {given!r} is no number") from None


def command(section: VllmSection, plan: NodePlan, place: WorkerPlan, *, nixl: bool = False) -> Sequence[str]:
    """The command of an instance. Raises `ModelError` for a packaged model that cannot be converted."""
    loads, stage = section.loads, section.stages[place.stage]
    if loads == smollm.NAME:
        loads = str(smollm.ensure_converted())
    options = ["--model", loads, "--served-model-name", section.name, "--uds", plan.engine_socket(place.name)]
    options += ["--tensor-parallel-size", str(stage.tensor_parallel_size)]
    options += ["--pipeline-parallel-size", str(stage.pipeline_parallel_size)]
    if not place.gpu_numbers:
        options += ["--block-size", _CPU_BLOCK_TOKENS]
    options += ["--disable-uvicorn-access-log"]  # a line for every request, and for every look at /health
    if section.context_tokens:
        options += ["--max-model-len", str(section.context_tokens)]
    if place.stage:
        options += [_TRANSFER, json.dumps(transfer_config(section, plan, place, nixl=nixl))]
    if place.stage == "prefill":
        options += ["--enable-prompt-tokens-details"]  # how much it had cached: a prompt's cost is that of the rest
    return [section.python, "-m", _SERVER, *options, *section.extra_args, *stage.extra_args]


def environment(section: VllmSection, plan: NodePlan, place: WorkerPlan) -> dict[str, str]:
    """The environment of an instance's processes."""
    kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    numbered = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if place.gpu_numbers else {}
    bound = {} if place.gpu_numbers else _bound(section, plan, place, sorted(os.sched_getaffinity(0)))
    found = bound | kept | numbered | section.environment
    return found | transfer_environment(found) if place.stage else found


def _bound(section: VllmSection, plan: NodePlan, place: WorkerPlan, cores: Sequence[int]) -> dict[str, str]:
    """The cores of an instance on a CPU, if there are several: by itself each vLLM binds its threads to the same ones,
    and two on one core take turns at the kernel's leisure. As vLLM does, one is left for others where there are more
    than processes."""
    engines = plan.of_role("engine")
    if len(engines) < 2:
        return {}
    sizes = {engine.name: section.stages[engine.stage] for engine in engines}
    ranks = [name for name, of in sizes.items() for _ in range(of.tensor_parallel_size * of.pipeline_parallel_size)]
    usable = cores[:-1] if len(cores) > len(ranks) else cores
    ends = [len(usable) * rank // len(ranks) for rank in range(len(ranks) + 1)]
    mine = [
        usable[begin:end] or [usable[rank % len(usable)]]
        for rank, (name, begin, end) in enumerate(zip(ranks, ends, ends[1:], strict=False))
        if name == place.name
    ]
    return {_BIND: "|".join(",".join(map(str, part)) for part in mine)}
