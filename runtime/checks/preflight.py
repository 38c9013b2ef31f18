"""What a node needs, looked for before anything of it starts: devices, collections, embedders, the model and its KV."""

import logging
from collections.abc import Mapping
from pathlib import Path

import psutil

from gpu import DeviceUnavailable, check_device
from runtime.checks.needs import host_bytes, needed_bytes
from runtime.errors import CollectionError, ConfigError, ModelError, ResourceBusy
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.embedding.embedder import check_embedder
from runtime.serving.model import smollm
from runtime.serving.model.model_info import ModelInfo, model_directory
from runtime.serving.model.packages import require_packages, torch_cuda

log = logging.getLogger("supervisor")


def check(plan: NodePlan, progress: smollm.Progress | None = None, machine: Machine | None = None) -> None:
    """Raise `ConfigError`, `CollectionError` or `ModelError` for what is missing, `ResourceBusy` for too little memory.

    A collection that is not required may be missing or damaged: that is logged.

    A packaged model that was never used before is converted here, once, and not by every worker's start. `machine`:
    the one that the plan was laid out on, by default this one as it is now.
    """
    for worker in plan.workers:
        try:
            check_device(worker.device)
        except DeviceUnavailable as error:
            raise ConfigError(
                f"{worker.role}.devices: {worker.name} cannot run on {worker.device!r}: {error}"
            ) from error
    for collection in plan.config.collections:
        try:
            info = Collection.info(Path(collection.path))
            Collection.open(Path(collection.path)).close()  # a file that is short, or of another version
        except CollectionError as error:
            if collection.required:
                raise
            log.warning("collection %s is not served: %s", collection.name, error.message)
            continue
        if info.shards != collection.shards:
            raise ConfigError(
                f"collections: {collection.name!r}: shards = {collection.shards}, but {collection.path} was built with "
                f"{info.shards}: say so here, or build it with `trinity index build --shards {collection.shards}`"
            )
        if info.embedder_name:
            check_embedder(info.embedder_name)
    if plan.config.own_model is not None:
        _check_model(plan, progress)
    _check_host_memory(plan)
    if any(worker.device != "cpu" for worker in plan.workers):
        _check_gpu_memory(plan, machine or Machine.read())


def _check_model(plan: NodePlan, progress: smollm.Progress | None) -> None:
    config = plan.config
    assert config.own_model is not None
    require_packages("torch", "safetensors")
    for worker in (*plan.of_role("prefill"), *plan.of_role("decode")):
        if worker.device != "cpu" and torch_cuda() is None:
            raise ConfigError(
                f"{worker.role}.devices: {worker.name} cannot run on {worker.device!r}: the installed torch has no "
                "CUDA; install a build of it that has (https://pytorch.org/get-started/locally)"
            )
    info = ModelInfo.read(config.own_model.name)
    directory = model_directory(config.own_model.name, progress)
    check_files(config.own_model.name, directory)
    context = config.own_model.context_tokens
    if context > info.max_context_tokens:
        raise ConfigError(
            f"model.context_tokens = {context}: {info.name} was made for at most {info.max_context_tokens}"
        )


def check_files(name: str, directory: Path) -> None:
    """Raise `ModelError` unless a model's directory has what only its workers read."""
    for pattern in ("tokenizer.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise ModelError(f"model.name = {name!r}: no {pattern} in {directory}")


def _check_host_memory(plan: NodePlan) -> None:
    """What the workers take of the host's memory must be free."""
    needed, free = host_bytes(plan), psutil.virtual_memory().available
    if sum(needed.values()) > free:
        raise ResourceBusy(
            f"the node needs {sum(needed.values()) / 2**30:.1f} GiB of memory ({_parts(needed)}), "
            f"{free / 2**30:.1f} are free: "
            "lower kv_blocks or slots of prefill or decode, decode.swap_blocks, model.context_tokens or spares"
        )


def _parts(needed: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count / 2**30:.1f}" for name, count in needed.items())


def _check_gpu_memory(plan: NodePlan, machine: Machine) -> None:
    """What is known to be needed must be free. What libraries take for themselves comes on top, and is not guessed."""
    needed = needed_bytes(plan)
    for gpu in machine.gpus:
        there = {worker.name: needed[worker.name] for worker in plan.processes if worker.gpu == gpu.uuid}
        if sum(there.values()) > gpu.free_bytes:
            raise ResourceBusy(
                f"GPU {gpu.index} ({gpu.uuid}) has {gpu.free_bytes / 2**30:.1f} GiB free, needed are {_parts(there)}: "
                "lower kv_blocks or slots of prefill or decode or model.context_tokens, or use more GPUs or shards"
            )
