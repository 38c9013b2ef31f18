"""What a node needs, looked for before anything of it starts: devices, collections, embedders, the model and its KV."""

from pathlib import Path

import psutil

from gpu import DeviceUnavailable, check_device
from runtime.errors import ConfigError, ModelError
from runtime.node.placement import NodePlan
from runtime.retrieval.collection import Collection
from runtime.retrieval.embedder import check_embedder
from runtime.serving.model import smollm
from runtime.serving.model.model_info import ModelInfo, model_directory
from runtime.serving.model.packages import require_packages


def check(plan: NodePlan, progress: smollm.Progress | None = None) -> None:
    """Raise `ConfigError`, `CollectionError` or `ModelError` for what is missing or does not fit.

    A packaged model that was never used before is converted here, once, and not by every worker's start.
    """
    for worker in plan.of_role("pool"):
        try:
            check_device(worker.device)
        except DeviceUnavailable as error:
            raise ConfigError(f"pool.devices: {worker.name} cannot run on {worker.device!r}: {error}") from error
    for collection in plan.config.collections:
        info = Collection.info(Path(collection.path))
        if info.shards != collection.shards:
            raise ConfigError(
                f"collections: {collection.name!r}: shards = {collection.shards}, but {collection.path} was built with "
                f"{info.shards}: say so here, or build it with `trinity index build --shards {collection.shards}`"
            )
        Collection.open(Path(collection.path)).close()  # a file that is short, or of another version
        if info.embedder_name:
            check_embedder(info.embedder_name)
    if plan.config.model is not None:
        _check_model(plan, progress)


def _check_model(plan: NodePlan, progress: smollm.Progress | None) -> None:
    config = plan.config
    assert config.model is not None
    require_packages("torch", "transformers", "safetensors")
    info = ModelInfo.read(config.model.name)
    directory = model_directory(config.model.name, progress)
    for pattern in ("tokenizer.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise ModelError(f"model.name = {config.model.name!r}: no {pattern} in {directory}")
    context = config.model.context_tokens
    if context > info.max_context_tokens:
        raise ConfigError(
            f"model.context_tokens = {context}: {info.name} was made for at most {info.max_context_tokens}"
        )
    blocks = config.prefill.workers * config.prefill.blocks(config.model)
    blocks += config.decode.workers * (config.decode.blocks(config.model) + config.decode.swap_blocks)
    needed, free = info.kv_bytes(blocks, config.model.kv_block_tokens), psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"prefill and decode KV needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free: "
            "lower kv_blocks or slots of prefill or decode, decode.swap_blocks or model.context_tokens"
        )
