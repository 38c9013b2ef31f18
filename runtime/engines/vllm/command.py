"""Command line and environment of a vLLM API server, run by the configured interpreter."""

import itertools
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.engines.event_endpoints import EventEndpoints
from runtime.engines.vllm.transfer import TRANSFER, has_own_transfer, transfer_config, transfer_environment
from runtime.errors import ConfigError
from runtime.node.engine_config import Stage, VllmSection
from runtime.node.forking import ONE_THREAD
from runtime.node.placement.plan import NodePlan, WorkerPlan
from runtime.serving.model import smollm

MIN_VERSION = (0, 20)
"""Oldest version with the options and responses used here; tested with 0.32."""

_EVENTS_VERSION = (0, 32)  # earlier ones need more memory for hybrid models while they publish events
_DEFAULT_MEMORY_SHARE = 0.92  # of vLLM 0.32; 0.9 in earlier versions
_SERVER = "vllm.entrypoints.openai.api_server"
_TIMEOUT_S = 60.0  # an interpreter starts slowly on a busy machine
# Reads metadata only: importing vLLM takes half a minute. Third-party builds have other distribution names.
_DETECT = """
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
found = packages_distributions().get("vllm")
print(version(found[0]) if found else "", "nixl" if find_spec("nixl") or find_spec("rixl") else "")
"""
_RESERVED_ARGUMENTS = ("--model", "--served-model-name", "--uds", "--host", "--port", "--tensor-parallel-size", "-tp",
         "--pipeline-parallel-size", "-pp", "--api-key", "--ssl-keyfile")  # fmt: skip
_CPU_BLOCK_TOKENS = "32"  # vLLM's minimum on a CPU: a probe recomputes the incomplete KV block
_BIND = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True, slots=True)
class Installation:
    """An installed vLLM: its version, whether NIXL is installed too, and whether it is to publish KV events."""

    version: str
    nixl: bool
    events: bool = False


def find_vllm(section: VllmSection) -> Installation:
    """Return the installation at `model.python`. Raises `ConfigError` if vLLM is missing or too old."""
    try:
        detected = subprocess.run([section.python, "-c", _DETECT], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"model.python = {section.python!r} cannot be run: {error}") from error
    version, _, nixl = detected.stdout.strip().partition(" ")
    if detected.returncode or not version:
        raise ConfigError(
            f"model.python = {section.python!r}: vLLM is not installed there: `{section.python} -m pip install vllm`, "
            "or set it to the interpreter of an environment that has it"
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < MIN_VERSION:
        oldest = ".".join(map(str, MIN_VERSION))
        raise ConfigError(f"vLLM {version} at model.python = {section.python!r} is too old: it needs {oldest} or later")
    return Installation(version, bool(nixl), numbers >= _EVENTS_VERSION)


def check_arguments(section: VllmSection) -> None:
    """Raise `ConfigError` for an extra argument that the node sets itself."""
    lists = [("model", section.extra_args)]
    lists += [(f"model.{name}", stage.extra_args) for name, stage in section.stages.items() if name]
    for key, argument in ((key, argument) for key, arguments in lists for argument in arguments):
        if argument.partition("=")[0].replace("_", "-") in _RESERVED_ARGUMENTS:
            raise ConfigError(f"{key}.extra_args: {argument!r} is set by the node, from [model]; remove it")


def extra_argument(section: VllmSection, stage: Stage, name: str) -> str:
    """Return the value of a vLLM option in a stage's extra arguments; "" if absent."""
    arguments = (*section.extra_args, *section.stages[stage].extra_args)
    values = [
        value if argument == name else argument.partition("=")[2]
        for argument, value in itertools.pairwise((*arguments, ""))
        if argument == name or argument.startswith(f"{name}=")
    ]
    return values[-1] if values else ""


def gpu_memory_share(section: VllmSection, stage: Stage = "") -> float:
    """Return the share of each GPU's memory that vLLM uses: from its arguments, or its default."""
    given = extra_argument(section, stage, "--gpu-memory-utilization")
    try:
        return float(given) if given else _DEFAULT_MEMORY_SHARE
    except ValueError:
        raise ConfigError(f"model.extra_args: --gpu-memory-utilization {given!r} is not a number") from None


def event_endpoints(plan: NodePlan, placement: WorkerPlan) -> EventEndpoints:
    """Return where an instance publishes its KV events, in the private run directory."""
    return EventEndpoints(f"ipc://{plan.run_dir}/{placement.name}.kv", f"ipc://{plan.run_dir}/{placement.name}.rep")


def _publishes_events(section: VllmSection, plan: NodePlan, stage: Stage) -> bool:
    """Whether there is a choice that an instance's KV events serve. With data parallelism vLLM has no such endpoint."""
    own = ("--kv-events-config", "--data-parallel-size", "-dp")
    return len(plan.of_role("engine")) > 1 and not any(extra_argument(section, stage, name) for name in own)


def command(
    section: VllmSection, plan: NodePlan, placement: WorkerPlan, *, nixl: bool = False, events: bool = False
) -> Sequence[str]:
    """Return the command line of an instance. Raises `ModelError` if a packaged model cannot be converted."""
    loads, stage = section.loads, section.stages[placement.stage]
    if loads == smollm.NAME:
        loads = str(smollm.ensure_converted())
    options = ["--model", loads, "--served-model-name", section.name, "--uds", plan.http_socket(placement.name)]
    options += ["--tensor-parallel-size", str(stage.tensor_parallel_size)]
    if not placement.gpu_numbers:
        options += ["--block-size", _CPU_BLOCK_TOKENS]
    options += ["--disable-uvicorn-access-log"]  # it logs every health check
    if placement.stage and not has_own_transfer(section, placement.stage):
        options += [TRANSFER, json.dumps(transfer_config(plan, placement, nixl=nixl))]
    if events and _publishes_events(section, plan, placement.stage):
        at = event_endpoints(plan, placement)
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": at.events}
        options += ["--kv-events-config", json.dumps(published | {"replay_endpoint": at.replay})]
    if placement.stage == "prefill":
        options += ["--enable-prompt-tokens-details"]  # the hand-over's cost model needs the cached tokens
    return [section.python, "-m", _SERVER, *options, *section.extra_args, *stage.extra_args]


def environment(section: VllmSection, plan: NodePlan, placement: WorkerPlan) -> dict[str, str]:
    """Return the environment variables of an instance's processes."""
    inherited = {name: value for name, value in os.environ.items() if name not in ONE_THREAD}  # it chooses its own
    numbered = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if placement.gpu_numbers else {}
    bound = {} if placement.gpu_numbers else _core_binding(section, plan, placement, sorted(os.sched_getaffinity(0)))
    variables = bound | inherited | numbered | section.environment
    return variables | transfer_environment(variables) if placement.stage else variables


def _core_binding(section: VllmSection, plan: NodePlan, placement: WorkerPlan, cores: Sequence[int]) -> dict[str, str]:
    """Return the variable that binds a CPU instance to its own cores; empty for a single instance.

    By default each vLLM binds its threads to the same cores, where two instances slow each other down. As in vLLM, one
    core stays free for other processes if there are more cores than vLLM processes.
    """
    engines = plan.of_role("engine")
    if len(engines) < 2:
        return {}
    sizes = {engine.name: section.stages[engine.stage] for engine in engines}
    ranks = [name for name, of in sizes.items() for _ in range(of.tensor_parallel_size)]
    usable = cores[:-1] if len(cores) > len(ranks) else cores
    ends = [len(usable) * rank // len(ranks) for rank in range(len(ranks) + 1)]
    own_cores = [
        usable[begin:end] or [usable[rank % len(usable)]]
        for rank, (name, begin, end) in enumerate(zip(ranks, ends, ends[1:], strict=False))
        if name == placement.name
    ]
    return {_BIND: "|".join(",".join(map(str, part)) for part in own_cores)}
