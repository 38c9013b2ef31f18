"""What a node needs, looked for before anything of it starts: devices, collections, embedders, a place for logs, the
model and its KV."""

import contextlib
import importlib
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from gpu import DeviceUnavailable, check_device
from runtime.checks.memory_estimate import estimate_device_bytes, estimate_host_bytes
from runtime.checks.vllm import LESS_ON_CPU, LESS_ON_GPU
from runtime.engines.vllm.command import check_arguments, find_vllm
from runtime.engines.vllm.transfer import check_transfer
from runtime.errors import CollectionError, ConfigError, ModelError, ResourceBusy
from runtime.node.config import CollectionSection, NodeConfig
from runtime.node.engine_config import ModelSection, VllmSection
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.embedding.embedder import EmbedderSpec
from runtime.retrieval.embedding.loading import check_embedder, embedder_location
from runtime.retrieval.live.collection import collection_info
from runtime.retrieval.live.storage.manifest import is_live
from runtime.serving.model import smollm
from runtime.serving.model.model_info import ModelInfo, model_directory
from runtime.serving.model.packages import require_packages, torch_cuda

log = logging.getLogger("supervisor")


def check(plan: NodePlan, progress: smollm.Progress | None = None, machine: Machine | None = None) -> None:
    """Raise `ConfigError`, `CollectionError` or `ModelError` for what is missing, `ResourceBusy` for too little memory.

    A packaged model that was never used before is converted here, once, and not by every worker's start. `machine`:
    the one that the plan was laid out on, by default this one as it is now.
    """
    check_without_start(plan)
    own_model = plan.config.own_model
    if own_model is not None and own_model.name == smollm.NAME:
        check_files(own_model.name, model_directory(own_model.name, progress))
    if isinstance(plan.config.model, VllmSection) and plan.config.model.loads == smollm.NAME:
        smollm.ensure_converted(progress)
    _check_host_memory(plan)
    if any(worker.device != "cpu" for worker in plan.workers):
        _check_gpu_memory(plan, machine or Machine.read())


def check_without_start(plan: NodePlan) -> None:
    """The part of `check` that converts no model and asks for no memory: what `serve --dry-run` looks at too.

    A collection that is not required may be missing or damaged: that is logged. Files are not compared with their
    checksums: `unverified_collections` has the collections of which a start does that.
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
            info = collection_info(Path(collection.path))
            if not is_live(Path(collection.path)):  # `info` has opened all of that
                Collection.open(Path(collection.path)).close()  # a file that is short, or of another version
        except CollectionError as error:
            if collection.required:
                raise
            log.warning("collection %s is not served: %s", collection.name, error.message)
            continue
        if info.shards != collection.shards:
            raise ConfigError(
                f"collections: {collection.name!r}: shards = {collection.shards}, but {collection.path} was built with "
                f"{info.shards}: say so here, or make it with "
                f"`trinity {'live create' if is_live(info.directory) else 'index build'} --shards {collection.shards}`"
            )
        if info.embedder:
            _check_embedder(collection, info.embedder)
    answers = plan.config.answer_cache
    if plan.config.stores_answers:
        try:
            check_embedder(answers.embedder)
        except ModelError as error:
            raise ConfigError(f"answer_cache.embedder: {error.message}") from error
    if plan.config.tracing.enabled:
        _check_tracing()
    if plan.config.own_model is not None:
        _check_model(plan, plan.config.own_model)
    if isinstance(plan.config.model, VllmSection):
        check_arguments(plan.config.model)
        check_transfer(plan.config.model, nixl=find_vllm(plan.config.model).nixl)
    if plan.config.log.directory:
        _check_log_directory(Path(plan.config.log.directory))


def _check_tracing() -> None:
    try:
        importlib.import_module("opentelemetry.sdk.trace")
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            f"tracing.enabled: {error}; install with: python -m pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http"
        ) from error


def _check_embedder(collection: CollectionSection, embedder: EmbedderSpec) -> None:
    try:
        check_embedder(embedder, embedder_location(collection))
    except (ModelError, ConfigError) as error:
        raise type(error)(f"collection {collection.name}: {error.message}") from error


def unverified_collections(config: NodeConfig) -> list[str]:
    """A line for each collection whose files a start compares with their checksums, which no check does."""
    return [
        f"collection {collection.name}: its checksums were not compared; the start does that, and so does "
        f"`trinity index verify {collection.path}`"
        for collection in config.collections
        if collection.verify == "start"
    ]


def _check_model(plan: NodePlan, model: ModelSection) -> None:
    require_packages("torch", "safetensors")
    for worker in (*plan.of_role("prefill"), *plan.of_role("decode")):
        if worker.device != "cpu" and torch_cuda() is None:
            raise ConfigError(
                f"{worker.role}.devices: {worker.name} cannot run on {worker.device!r}: the installed torch has no "
                "CUDA; install a build of it that has (https://pytorch.org/get-started/locally)"
            )
    info = ModelInfo.read(model.name)
    if model.context_tokens > info.max_context_tokens:
        raise ConfigError(
            f"model.context_tokens = {model.context_tokens}: {info.name} was made for at most {info.max_context_tokens}"
        )
    if model.name != smollm.NAME:
        check_files(model.name, Path(model.name))


def _check_log_directory(directory: Path) -> None:
    """Try it: whether a file can be made there is not always for permissions to say. Nothing is left behind."""
    missing: list[Path] = []
    try:
        missing += (path for path in (directory, *directory.parents) if not path.exists())
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"log.directory = {str(directory)!r}: log files cannot be written there: {reason}") from error
    finally:
        for path in missing:  # the innermost first
            with contextlib.suppress(OSError, ValueError):
                path.rmdir()


def check_files(name: str, directory: Path) -> None:
    """Raise `ModelError` unless a model's directory has what only its workers read."""
    for pattern in ("tokenizer.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise ModelError(f"model.name = {name!r}: no {pattern} in {directory}")


def _check_host_memory(plan: NodePlan) -> None:
    """What the workers take of the host's memory must be free."""
    needed, free = estimate_host_bytes(plan), psutil.virtual_memory().available
    if sum(needed.values()) > free:
        advice = "lower kv_blocks or slots of prefill or decode, kv.host_mib, model.context_tokens or spares"
        if isinstance(plan.config.model, VllmSection):
            advice = LESS_ON_CPU if plan.config.model.on_cpu else "run fewer instances"
        raise ResourceBusy(
            f"the node needs {sum(needed.values()) / 2**30:.1f} GiB of memory ({_parts(needed)}), "
            f"{free / 2**30:.1f} are free: {advice}"
        )


def _parts(needed: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count / 2**30:.1f}" for name, count in needed.items())


def _check_gpu_memory(plan: NodePlan, machine: Machine) -> None:
    """What is known to be needed must be free. What libraries take for themselves comes on top, and is not guessed."""
    needed = estimate_device_bytes(plan, machine)
    for gpu in machine.gpus:
        there = {worker.name: needed[worker.name] for worker in plan.processes if worker.gpu == gpu.uuid}
        if sum(there.values()) > gpu.free_bytes:
            advice = "lower kv_blocks or slots of prefill or decode or model.context_tokens, or use more GPUs or shards"
            if isinstance(plan.config.model, VllmSection):
                advice = LESS_ON_GPU
            raise ResourceBusy(
                f"GPU {gpu.index} ({gpu.uuid}) has {gpu.free_bytes / 2**30:.1f} GiB free, needed are {_parts(there)}: "
                f"{advice}"
            )
