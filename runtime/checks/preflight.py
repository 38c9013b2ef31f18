"""Preflight checks of a plan: devices, collections, embedders, directories, model, memory."""

import errno
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from gpu import DeviceUnavailable, check_device
from runtime.checks.memory_estimate import Need, estimate, shared_bytes
from runtime.checks.vllm import LESS_ON_CPU, LESS_ON_GPU
from runtime.engines.vllm.command import check_arguments, find_vllm
from runtime.engines.vllm.transfer import check_transfer
from runtime.errors import CollectionError, ConfigError, ModelError, ResourceBusy
from runtime.node.config import CollectionSection, NodeConfig
from runtime.node.engine_config import ModelSection, VllmSection
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import CPU, NodePlan
from runtime.node.run_dir import check_run_dir
from runtime.packages import require_packages, torch_cuda
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.embedder import EmbedderSpec
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, EmbedderLocation, check_embedder, embedder_location
from runtime.retrieval.reranking.reranker import check_reranker
from runtime.serving.model import smollm
from runtime.serving.model.model_info import ModelInfo, model_directory

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger("supervisor")


def check(plan: NodePlan, progress: smollm.Progress | None = None, machine: Machine | None = None) -> None:
    """Raise `ConfigError`, `CollectionError` or `ModelError` if something is missing, `ResourceBusy` if memory is too
    small.

    A packaged model that was never used is converted here, once, and not by every worker. `machine`: the one that the
    plan was laid out on, by default this machine.
    """
    check_without_start(plan)
    own_model = plan.config.own_model
    if own_model is not None and own_model.name == smollm.NAME:
        check_files(own_model.name, model_directory(own_model.name, progress))
    if isinstance(plan.config.model, VllmSection) and plan.config.model.loads == smollm.NAME:
        smollm.ensure_converted(progress)
    check_memory(plan, machine)


def check_memory(plan: NodePlan, machine: Machine | None = None) -> None:
    """Raise `ResourceBusy` unless the host and each GPU have the estimated memory free. `machine`: as of `check`."""
    uses_gpus = any(worker.device != CPU or worker.only_embeds_on_gpu for worker in plan.workers)
    if uses_gpus and machine is None:
        machine = Machine.read()
    needs = estimate(plan, machine)
    _check_host_memory(plan, needs)
    if uses_gpus and machine is not None:
        _check_gpu_memory(plan, needs, machine)


def check_without_start(plan: NodePlan) -> None:
    """Run the part of `check` that neither converts a model nor needs free memory, as `serve --dry-run` does.

    An optional collection that is missing or damaged is logged. Files are not compared with their checksums: see
    `unverified_collections`.
    """
    for worker in plan.workers:
        for key, what, device in (
            (f"{worker.role}.devices", "run", worker.device),
            ("embedding.devices", "embed", worker.embedder),
        ):
            try:
                check_device(device)
            except DeviceUnavailable as error:
                raise ConfigError(f"{key}: {worker.name} cannot {what} on {device!r}: {error}") from error
    device = next((worker.embedder for worker in plan.workers if worker.embedder != CPU), CPU)
    for collection in plan.config.collections:
        try:
            with CollectionReader(Path(collection.path)) as opened:
                info = opened.description
        except CollectionError as error:
            if collection.required:
                raise type(error)(f"collection {collection.name}: {error.message}") from error
            log.warning("collection %s is unavailable: %s", collection.name, error.message)
            continue
        if info.shards != collection.shards:
            raise ConfigError(
                f"collections: {collection.name!r}: shards = {collection.shards}, but {collection.path} was built with "
                f"{info.shards}: set shards = {info.shards}, or rebuild it with "
                f"`trinity index build --shards {collection.shards}`"
            )
        if info.embedder:
            _check_embedder(collection, info.embedder, device)
    if plan.config.stores_answers or plan.config.stores.path:
        check_embedder(DEFAULT_EMBEDDER, EmbedderLocation(device=device))
    check_reranker(plan.config.rerank)
    if plan.config.own_model is not None:
        _check_model(plan, plan.config.own_model)
    if isinstance(plan.config.model, VllmSection):
        check_arguments(plan.config.model)
        check_transfer(plan.config.model, nixl=find_vllm(plan.config.model).nixl)
    check_run_dir(Path(plan.run_dir))
    _check_directory("node.run_dir", plan.run_dir, "files")
    _check_directory("log.directory", plan.config.log.directory, "log files")
    _check_directory("stores.path", plan.config.stores.path, "files")
    if plan.config.own_model is not None:
        _check_directory("kv.disk_path", plan.config.kv.disk_path, "files")


def _check_embedder(collection: CollectionSection, embedder: EmbedderSpec, device: str) -> None:
    try:
        check_embedder(embedder, embedder_location(collection, device))
    except (ModelError, ConfigError) as error:
        raise type(error)(f"collection {collection.name}: {error.message}") from error


def unverified_collections(config: NodeConfig) -> list[str]:
    """Return one line per collection whose checksums are compared at start, which the checks do not do."""
    return [
        f"collection {collection.name}: its checksums were not compared; the start compares them, as does "
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
                "CUDA; install a build with CUDA (https://pytorch.org/get-started/locally)"
            )
    info = ModelInfo.read(model.name)
    if model.context_tokens > info.max_context_tokens:
        raise ConfigError(
            f"model.context_tokens = {model.context_tokens}: {info.name} supports at most {info.max_context_tokens}"
        )
    if model.name != smollm.NAME:
        check_files(model.name, Path(model.name))


def _check_directory(key: str, path: str, files: str) -> None:
    """Try to create a file: permissions alone do not tell whether that is possible. Nothing is left behind."""
    if not path:
        return
    directory = Path(path)
    try:
        try:
            _create_in(directory)
        except FileNotFoundError:  # removed by a stopping node in between, or for good
            _create_in(directory)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in _NO_ROOM and directory.is_dir() and key != "log.directory":
            return  # what is there can be served, and deleted
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key} = {path!r}: cannot create {files} there: {reason}") from error


def _create_in(directory: Path) -> None:
    """Create a file in a directory. A missing one is made beside its place, where nodes that start meanwhile make it:
    none of them may lose its own."""
    there = next(folder for folder in (directory, *directory.parents) if os.path.lexists(folder))
    if there == directory:
        tempfile.TemporaryFile(dir=directory).close()
        return
    with tempfile.TemporaryDirectory(dir=there) as beside:
        (beside / directory.relative_to(there)).mkdir(parents=True)


def check_files(name: str, directory: Path) -> None:
    """Raise `ModelError` unless a model's directory has the files that only its workers read."""
    for pattern in ("tokenizer.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise ModelError(f"model.name = {name!r}: no {pattern} in {directory}")


def _check_host_memory(plan: NodePlan, needs: Mapping[str, Need]) -> None:
    """Check that the host has the estimated memory free."""
    needed = {name: need.host for name, need in needs.items()} | shared_bytes(plan)
    free = psutil.virtual_memory().available
    if sum(needed.values()) > free:
        advice = "lower kv_blocks or slots of prefill or decode, kv.host_mib, model.context_tokens or spares"
        if isinstance(plan.config.model, VllmSection):
            advice = LESS_ON_CPU if plan.config.model.on_cpu else "run fewer instances"
        raise ResourceBusy(
            f"the node needs {sum(needed.values()) / 2**30:.1f} GiB of memory ({_parts(needed)}), "
            f"but {free / 2**30:.1f} GiB are free: {advice}"
        )


def _parts(needed: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count / 2**30:.1f}" for name, count in needed.items())


def _check_gpu_memory(plan: NodePlan, needs: Mapping[str, Need], machine: Machine) -> None:
    """Check that each GPU has the estimated memory free. The allocations of CUDA's libraries are not included."""
    for gpu in machine.gpus:
        needed = {worker.name: needs[worker.name].gpu for worker in plan.processes if worker.gpu == gpu.uuid}
        if sum(needed.values()) > gpu.free_bytes:
            advice = "lower kv_blocks or slots of prefill or decode or model.context_tokens, or use more GPUs or shards"
            if isinstance(plan.config.model, VllmSection):
                advice = LESS_ON_GPU
            raise ResourceBusy(
                f"GPU {gpu.index} ({gpu.uuid}) has {gpu.free_bytes / 2**30:.1f} GiB free, but the node needs "
                f"{_parts(needed)}: {advice}"
            )
