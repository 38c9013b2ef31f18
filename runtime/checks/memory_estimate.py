"""Memory estimate of each worker of a plan: process, embedders, index, or model and KV.

On the host it is the proportional set size (Pss): memory that several processes share, such as what they were forked
with, counts for each by its share. The base size of a process was measured on a node with one worker per role, alone on
its machine (torch 2.13, numba 0.68, onnxruntime 1.31); `tests/e2e/test_memory.py` compares the sum with a running node.
"""

from collections.abc import Callable
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
class Need:
    """Bytes of one process: of the host's memory, of its GPU's, and of an index that it maps from files, whose pages
    need not be free."""

    host: int
    gpu: int = 0
    mapped: int = 0

    def free(self, worker: WorkerPlan) -> int:
        """Return what must be free where the worker's model or index lies: on its GPU, or on the host."""
        return self.host if worker.device == CPU else self.gpu


def estimate(plan: NodePlan, machine: Machine | None = None) -> dict[str, Need]:
    """Return what each process needs, by name.

    KV that decode maps to pull it counts for prefill. vLLM allocates a share of the GPU memory that `machine` has.
    Raises `CollectionError`, `ConfigError` and `ModelError`.
    """
    return {worker.name: _need_of(worker, plan, machine) for worker in plan.processes}


def shared_bytes(plan: NodePlan) -> dict[str, int]:
    """Return the bytes of the host's memory that the processes share, by what they are."""
    if plan.config.own_model is None:
        return {IMPORTS: _TEMPLATE}
    return {IMPORTS: _TEMPLATE_WITH_TORCH, "KV in the host tier": plan.config.kv.host_mib << 20}


def _need_of(worker: WorkerPlan, plan: NodePlan, machine: Machine | None) -> Need:
    config, host = plan.config, _PROCESS[worker.role]
    if worker.role == "pool":
        indexes = {one: _read(one, lambda opened: opened.state.file_bytes(INDEX)) or 0 for one in config.collections}
        if worker.device != CPU:
            return Need(host, gpu=sum(size // collection.shards for collection, size in indexes.items()))
        return Need(host, mapped=sum(indexes.values()) // len(plan.of_role("pool")))  # replicas map the same files
    if isinstance(config.model, VllmSection) and worker.role == "engine":
        on_gpu = vllm.gpu_bytes(config.model, worker, machine) if machine else 0
        return Need(host + vllm.host_bytes(config.model, worker.stage), on_gpu)
    host += _embedders_on_host(plan) + (_reranker(config.rerank) if worker.role != "decode" else 0)
    on_gpu = _embedders_on_gpu(worker, plan) if worker.embedder != CPU else 0
    if worker.role == "frontend" and config.stores_answers:
        host += _EMBEDDERS[MINILM]
    if worker.role in ("frontend", "http") or config.own_model is None:
        return Need(host + (_TORCH if worker.embedder != CPU else 0), on_gpu)
    section = config.prefill if worker.role == "prefill" else config.decode
    info, size = ModelInfo.read(config.own_model.name), plan.block_tokens
    weights = weights_type(config.own_model.weights, worker.device)
    if weights == "int8" and worker.role == "prefill":
        weights = "bfloat16"  # prefill only has passes of many tokens
    kv = info.kv_bytes(section.blocks(config.own_model, size), size, kv_type(weights, kernels_on(worker.device)))
    data = _weights_bytes(info, weights, on_host=worker.device == CPU) + kv
    return Need(host + data, on_gpu) if worker.device == CPU else Need(host, data + on_gpu)


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
