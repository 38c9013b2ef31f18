"""Memory estimate of each worker of a plan: process, embedders, index, or model and KV.

On the host it is the proportional set size (Pss): memory that several processes share, such as what they were forked
with, counts for each by its share. The base size of a process was measured on a node with one worker per role, alone on
its machine (torch 2.13, numba 0.68, onnxruntime 1.31); `tests/e2e/test_memory.py` compares the sum with a running node.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from runtime.checks import vllm
from runtime.errors import CollectionError
from runtime.node.config import CollectionSection, Role
from runtime.node.engine_config import VllmSection
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import CPU, NodePlan, WorkerPlan
from runtime.node.retrieval_config import RerankSection
from runtime.retrieval.collections.description import INDEX
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.embedder import DirectorySpec, EmbedderSpec
from runtime.retrieval.embedding.loading import (
    DEFAULT_LOCATION,
    EmbedderLocation,
    embedder_location,
    gpu_files,
    model_bytes,
)
from runtime.retrieval.embedding.model_directory import read_model_directory
from runtime.retrieval.embedding.onnx_model import MINILM
from runtime.serving.model.model_info import ModelInfo, WeightsType, kernels_on, kv_type, weights_type

T = TypeVar("T")
IMPORTS = "imports that workers share"
_MIB = 1 << 20
_PROCESS: dict[Role, int] = {
    "pool": 48 * _MIB,
    "prefill": 90 * _MIB,
    "decode": 90 * _MIB,
    "engine": 60 * _MIB,  # the supervisor of vLLM's server
    "frontend": 66 * _MIB,
    "http": 66 * _MIB,
}
"""Base size of a process of each role: interpreter, libraries and compiled code.

A worker that has compiled code itself, at the first start after an installation, holds up to 650 MiB more."""
_TEMPLATE, _TEMPLATE_WITH_TORCH = 50 * _MIB, 110 * _MIB
"""The process from which workers are forked; with model workers it imports torch."""
_EMBEDDERS = {MINILM: 122 * _MIB}
"""onnxruntime and the network; feature hashing and embedding servers need almost nothing."""
_ONNXRUNTIME = 96 * _MIB
_TORCH = 200 * _MIB
"""torch in a process that has no model; what CUDA's libraries need besides was not measured."""


@dataclass(frozen=True)
class _Parts:
    """Bytes of one worker: of its process, of private data, and of mapped files."""

    process: int
    data: int
    mapped: int = 0


def estimate_device_bytes(plan: NodePlan, machine: Machine | None = None) -> dict[str, int]:
    """Return bytes by worker: on its GPU, if it has one, those of its index, or of weights and KV; on the host, all of
    them.

    KV that decode maps to pull it counts for prefill. vLLM allocates a share of the GPU memory that `machine` has.
    Raises `CollectionError`, `ConfigError` and `ModelError`.
    """
    needed = {}
    for placement in plan.processes:
        parts = _parts_of(placement, plan)
        needed[placement.name] = parts.data + parts.mapped + (parts.process if placement.device == "cpu" else 0)
        if isinstance(section := plan.config.model, VllmSection) and placement.role == "engine":
            on_gpu = placement.gpu and machine is not None and not machine.simulated
            needed[placement.name] = (
                vllm.gpu_bytes(section, placement, machine) if on_gpu and machine else parts.process
            )
    return needed


def estimate_host_bytes(plan: NodePlan) -> dict[str, int]:
    """Return the bytes of host memory that must be free, by worker and shared part: all but the pages of a mapped
    index."""
    needed = {}
    for placement in plan.processes:
        parts = _parts_of(placement, plan)
        needed[placement.name] = parts.process + (parts.data if placement.device == "cpu" else 0)
    needed[IMPORTS] = _TEMPLATE
    if plan.config.own_model is not None:
        needed[IMPORTS] = _TEMPLATE_WITH_TORCH
        needed["KV in the host tier"] = plan.config.kv.host_mib << 20
    return needed


def embedding_only(plan: NodePlan) -> Iterator[tuple[WorkerPlan, int]]:
    """Yield the workers on the CPU that embed on a GPU, and the bytes that this needs there. Raises as
    `estimate_device_bytes`."""
    for worker in plan.processes:
        if worker.only_embeds_on_gpu:
            yield worker, _embedders_on_gpu(worker, plan)


def estimate_added_bytes(plan: NodePlan, machine: Machine | None = None) -> dict[str, int]:
    """Return the bytes that must be free for another worker like each one: on its GPU, or on the host, where an index
    that is larger than the memory may be mapped."""
    host, device = estimate_host_bytes(plan), estimate_device_bytes(plan, machine)
    return {
        placement.name: (host if placement.device == "cpu" else device)[placement.name] for placement in plan.processes
    }


def _parts_of(worker: WorkerPlan, plan: NodePlan) -> _Parts:
    config, process = plan.config, _PROCESS[worker.role]
    if worker.role == "pool":
        holders = len(plan.of_role("pool"))
        indexes = {one: _read(one, lambda opened: opened.state.file_bytes(INDEX)) or 0 for one in config.collections}
        if worker.device != "cpu":
            return _Parts(process, sum(size // collection.shards for collection, size in indexes.items()))
        return _Parts(process, 0, mapped=sum(indexes.values()) // holders)  # replicas map the same files
    if worker.role == "engine":
        return _Parts(
            process + (vllm.host_bytes(config.model, worker.stage) if isinstance(config.model, VllmSection) else 0), 0
        )
    process += _embedders_on_host(plan) + (_reranker(config.rerank) if worker.role != "decode" else 0)
    if worker.role in ("frontend", "http") and worker.embedder != CPU:
        process += _TORCH
    if worker.role == "http":
        return _Parts(process, 0)
    if worker.role == "frontend" or config.own_model is None:
        return _Parts(process + (_EMBEDDERS[MINILM] if config.stores_answers else 0), 0)
    section = config.prefill if worker.role == "prefill" else config.decode
    info, size = ModelInfo.read(config.own_model.name), plan.block_tokens
    weights = weights_type(config.own_model.weights, worker.device)
    if weights == "int8" and worker.role == "prefill":
        weights = "bfloat16"  # prefill only has passes of many tokens
    kv = info.kv_bytes(section.blocks(config.own_model, size), size, kv_type(weights, kernels_on(worker.device)))
    data = _weights_bytes(info, weights, on_host=worker.device == CPU) + kv
    on_gpu = worker.device != CPU and worker.embedder != CPU
    return _Parts(process, data + (_embedders_on_gpu(worker, plan) if on_gpu else 0))


def _embedders_on_gpu(worker: WorkerPlan, plan: NodePlan) -> int:
    """Return the bytes of the embedders that a worker runs on a GPU, CUDA's own not included."""
    of_embedders = [gpu_files(embedder, location) for embedder, location in _embedders(plan).items()]
    if worker.role == "frontend" and plan.config.stores_answers:
        of_embedders.append(gpu_files(MINILM))
    return sum(files.gpu_bytes for files in of_embedders if files is not None)


def _embedders_on_host(plan: NodePlan) -> int:
    """Return the bytes of the embedders that a client of the pool runs on the CPU."""
    return sum(
        _ONNXRUNTIME + model_bytes(embedder, location)
        if isinstance(embedder, DirectorySpec)
        else _EMBEDDERS.get(str(embedder), 0)
        for embedder, location in _embedders(plan).items()
    )


def _embedders(plan: NodePlan) -> dict[EmbedderSpec, EmbedderLocation]:
    """Return the embedders that every client of the pool loads, of collections and stores, and where they are."""
    locations: dict[EmbedderSpec, EmbedderLocation] = {}
    for collection in plan.config.collections:
        embedder = _read(collection, lambda opened: opened.embedder)
        if embedder is not None:
            locations[embedder] = embedder_location(collection)
    if plan.config.stores.path:
        locations[MINILM] = DEFAULT_LOCATION
    return locations


def _reranker(section: RerankSection) -> int:
    """Return the bytes of a reranker that a process runs itself."""
    local = bool(section.model) and not section.url
    return _ONNXRUNTIME + read_model_directory(Path(section.model)).size_bytes() if local else 0


def _read(collection: CollectionSection, read: Callable[[CollectionReader], T]) -> T | None:
    """Return what `read` does of a collection, None for an optional one that does not exist. Raises
    `CollectionError`."""
    try:
        with CollectionReader(Path(collection.path)) as opened:
            return read(opened)
    except CollectionError:
        if collection.required:
            raise
        return None


def _weights_bytes(info: ModelInfo, weights: WeightsType, *, on_host: bool) -> int:
    """Return the bytes of weights of this type, and of the embedding as float32. On a host the embedding stays in its
    file, of which only the used rows are read."""
    each, table = {"float32": 4, "int8": 1 + 2}.get(weights, 2), info.vocabulary * info.hidden
    shared = info.tied and weights == "float32"
    return each * (info.layer_weights + table) + (0 if on_host or shared else 4 * table)
