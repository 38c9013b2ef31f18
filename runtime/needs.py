"""How much memory each worker of a plan will take: the parts whose sizes are known before it starts."""

from pathlib import Path

from runtime.errors import CollectionError
from runtime.node.config import CollectionSection, ModelSection
from runtime.node.placement import NodePlan
from runtime.retrieval.collection import Collection
from runtime.serving.model import smollm
from runtime.serving.model.model_info import ModelInfo


def needed_bytes(plan: NodePlan) -> dict[str, int]:
    """Bytes by worker, on its GPU if it has one: a pool's indexes; a prefill or decode worker's weights and KV.

    Swap space counts on a CPU; that of a worker on a GPU is in the host's memory. The frontend's bytes are few.
    """
    config = plan.config
    indexes = sum(_index_bytes(collection) for collection in config.collections)
    needed = {worker.name: indexes for worker in plan.of_role("pool")}
    if (model := config.own_model) is not None:
        weights = _weights_bytes(model)
        info = ModelInfo.read(model.name)
        for worker in (*plan.of_role("prefill"), *plan.of_role("decode"), *plan.spares):
            section = config.prefill if worker.role == "prefill" else config.decode
            blocks = section.blocks(model)
            if worker.role == "decode" and worker.device == "cpu":
                blocks += config.decode.swap_blocks
            needed[worker.name] = weights + info.kv_bytes(blocks, model.kv_block_tokens)
    return needed


def _index_bytes(collection: CollectionSection) -> int:
    """None for a collection that the node can do without and that is not there. Raises `CollectionError`."""
    try:
        return Collection.info(Path(collection.path)).index_bytes
    except CollectionError:
        if collection.required:
            raise
        return 0


def _weights_bytes(model: ModelSection) -> int:
    """Of its files; of a packaged model, which may not be converted yet, by its shapes."""
    if model.name != smollm.NAME:
        return sum(path.stat().st_size for path in Path(model.name).glob("*.safetensors"))
    info, shapes = ModelInfo.read(model.name), smollm.CONFIG
    attention = 2 * info.hidden * (info.heads + info.kv_heads) * info.head_dim
    mlp = 3 * info.hidden * int(shapes["intermediate_size"])
    return 4 * (info.layers * (attention + mlp) + info.vocabulary * info.hidden)
