"""Checks of `engine = "vllm"`: whether vLLM is installed and supports the configuration; its need of memory."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from runtime.checks.finding import Finding
from runtime.engines.vllm.command import check_arguments, extra_argument, find_vllm, gpu_memory_share
from runtime.engines.vllm.transfer import FILES, NIXL, TRANSFER, check_transfer, has_own_transfer
from runtime.errors import ConfigError
from runtime.node.engine_config import Stage, VllmSection
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import WorkerPlan
from runtime.serving.model import smollm
from runtime.serving.model.model_info import ModelInfo

_GIB = 1 << 30
_PROCESSES = 2000 << 20
"""Server, core and worker of an instance, measured without weights and KV (vLLM 0.32, build for CPUs)."""
_KV_ON_CPU = "VLLM_CPU_KVCACHE_SPACE"
LESS_ON_CPU = f'reduce its memory: environment = {{ {_KV_ON_CPU} = "1" }}, GiB of KV per instance'
LESS_ON_GPU = 'reduce its memory: extra_args = ["--gpu-memory-utilization", "0.8"]'


def findings(section: VllmSection) -> Iterator[Finding]:
    """Yield the findings of `trinity doctor`."""
    try:
        check_arguments(section)
        vllm = find_vllm(section)
        check_transfer(section, nixl=vllm.nixl)
    except ConfigError as error:
        yield Finding("error", "vLLM", error.message, "fix [model], or install it there")
        return
    counts = " and ".join(f"{stage.instances} {name}".rstrip() for name, stage in section.stages.items())
    connector = ""
    if section.prefill is not None:
        connector = f", KV by {NIXL if vllm.nixl else FILES}"
        connector = f", KV as {TRANSFER} says" if has_own_transfer(section, "prefill") else connector
    yield Finding("ok", "vLLM", f"{vllm.version}, {counts} × {section.loads}{connector}")


def host_bytes(section: VllmSection, stage: Stage) -> int:
    """Return the bytes of host memory of an instance: on a CPU with weights and KV, as far as they are known (the
    weights of a model of the hub are not). Raises `ConfigError`."""
    if not section.on_cpu:
        return _PROCESSES
    given = section.environment.get(_KV_ON_CPU) or extra_argument(section, stage, "--kv-cache-memory-bytes")
    if not given:  # vLLM then uses all that is left of its share
        return int(gpu_memory_share(section, stage) * psutil.virtual_memory().total)
    try:
        kv = int(given) * (_GIB if section.environment.get(_KV_ON_CPU) else 1)
    except ValueError:
        raise ConfigError(f"model: {_KV_ON_CPU} or --kv-cache-memory-bytes {given!r} is not a number") from None
    return _PROCESSES + kv + _weights(section, stage)


def gpu_bytes(section: VllmSection, placement: WorkerPlan, machine: Machine) -> int:
    """Return the bytes that an instance allocates on each of its GPUs, for weights and KV. 0 without such a GPU."""
    total = next((gpu.memory_bytes for gpu in machine.gpus if gpu.uuid == placement.gpu), 0)
    return int(gpu_memory_share(section, placement.stage) * total)


def _weights(section: VllmSection, stage: Stage) -> int:
    wide = extra_argument(section, stage, "--dtype") in ("float32", "float")
    if section.loads == smollm.NAME:
        info = ModelInfo.read(smollm.NAME)
        return (4 if wide else 2) * (info.layer_weights + info.vocabulary * info.hidden)
    files = Path(section.loads).glob("*.safetensors") if Path(section.loads).is_dir() else ()
    return sum(file.stat().st_size for file in files)
