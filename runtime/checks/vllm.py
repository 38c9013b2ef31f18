"""vLLM on this machine: whether it is there with what is configured, and how much memory its instances take."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import psutil

from runtime.checks.finding import Finding
from runtime.engines.vllm.command import check_arguments, extra_argument, find_vllm, gpu_memory_share
from runtime.engines.vllm.transfer import check_transfer, select_connector
from runtime.errors import ConfigError
from runtime.node.engine_config import Stage, VllmSection
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import WorkerPlan
from runtime.serving.model import smollm
from runtime.serving.model.model_info import ModelInfo

_GIB = 1 << 30
_PROCESSES = 2000 << 20
"""Of an instance's server, core and worker, measured without weights and KV (0.32's build for CPUs)."""
_KV_ON_CPU = "VLLM_CPU_KVCACHE_SPACE"
LESS_ON_CPU = f'give vLLM less: environment = {{ {_KV_ON_CPU} = "1" }}, GiB of KV an instance'
LESS_ON_GPU = 'give vLLM less: extra_args = ["--gpu-memory-utilization", "0.8"]'


def findings(section: VllmSection, machine: Machine) -> Iterator[Finding]:
    """For `trinity doctor`."""
    try:
        check_arguments(section)
        found = find_vllm(section)
        check_transfer(section, nixl=found.nixl)
    except ConfigError as error:
        yield Finding("error", "vLLM", error.message, "mend [model], or install it there")
        return
    counts = " and ".join(f"{stage.instances} {name}".rstrip() for name, stage in section.stages.items())
    way = f", KV by {select_connector(section, nixl=found.nixl)}" if section.prefill is not None else ""
    yield Finding("ok", "vLLM", f"{found.version}, {counts} × {section.loads}{way}")
    if section.on_cpu:
        yield from _on_cpu(section)
    yield from _on_gpus(section, machine)


def host_bytes(section: VllmSection, stage: Stage) -> int:
    """Of the host's memory that an instance takes: on a CPU weights and KV too, as far as they can be told (a model of
    the hub has its weights there). Raises `ConfigError`."""
    if not section.on_cpu:
        return _PROCESSES
    given = section.environment.get(_KV_ON_CPU) or extra_argument(section, stage, "--kv-cache-memory-bytes")
    if not given:  # then vLLM takes all that is left of its share
        return int(gpu_memory_share(section, stage) * psutil.virtual_memory().total)
    try:
        kv = int(given) * (_GIB if section.environment.get(_KV_ON_CPU) else 1)
    except ValueError:
        raise ConfigError(f"model: {_KV_ON_CPU} or --kv-cache-memory-bytes {given!r} is not a number") from None
    return _PROCESSES + kv + _weights(section, stage)


def gpu_bytes(section: VllmSection, place: WorkerPlan, machine: Machine) -> int:
    """Of each of its GPUs' memory that an instance takes: weights, KV and all. 0 where there is no such GPU."""
    total = next((gpu.memory_bytes for gpu in machine.gpus if gpu.uuid == place.gpu), 0)
    return int(gpu_memory_share(section, place.stage) * total)


def _weights(section: VllmSection, stage: Stage) -> int:
    wide = extra_argument(section, stage, "--dtype") in ("float32", "float")
    if section.loads == smollm.NAME:
        info = ModelInfo.read(smollm.NAME)
        return (4 if wide else 2) * (info.layer_weights + info.vocabulary * info.hidden)
    files = Path(section.loads).glob("*.safetensors") if Path(section.loads).is_dir() else ()
    return sum(file.stat().st_size for file in files)


def _on_cpu(section: VllmSection) -> Iterator[Finding]:
    needed = sum(stage.instances * host_bytes(section, name) for name, stage in section.stages.items())
    free = psutil.virtual_memory().available
    said = f"{free / _GIB:.1f} GiB free, vLLM takes about {needed / _GIB:.1f}"
    yield Finding.of(needed <= free, "memory for vLLM", said, f"free it, or {LESS_ON_CPU}", "error")


def _on_gpus(section: VllmSection, machine: Machine) -> Iterator[Finding]:
    """Whether its GPUs have as much free memory as it will ask for."""
    names = iter(section.gpus)
    for stage, of_stage in section.stages.items():
        share = gpu_memory_share(section, stage)
        for name in itertools.chain.from_iterable(itertools.islice(names, of_stage.instances)):
            try:
                gpu = machine.find(name)
            except ConfigError as error:
                yield Finding("error", f"model.devices {name}", error.message, "nvidia-smi -L lists them")
                continue
            wanted = int(share * gpu.memory_bytes)
            said = f"{gpu.free_bytes / _GIB:.0f} GiB free, vLLM takes {wanted / _GIB:.0f} ({share:g} of all)"
            advice = f"free it, or {LESS_ON_GPU}"
            yield Finding.of(gpu.free_bytes >= wanted, f"GPU {gpu.index} for vLLM", said, advice, "error")
