"""How much memory each worker of a plan will take: the parts whose sizes are known before it starts."""

from pathlib import Path

from runtime.node.config import ModelSection
from runtime.node.placement import NodePlan
from runtime.retrieval.collection import Collection
from runtime.serving.model import smollm
from runtime.serving.model.model_info import ModelInfo


def needed_bytes(plan: NodePlan) -> dict[str, int]:
    """Bytes by worker: a pool's indexes; a prefill or decode worker's weights and KV. The frontend's are few."""
    config = plan.config
    indexes = sum(Collection.info(Path(collection.path)).index_bytes for collection in config.collections)
    needed = {worker.name: indexes for worker in plan.of_role("pool")}
    if (model := config.model) is not None:
        weights = _weights_bytes(model)
        info = ModelInfo.read(model.name)
        prefill = config.prefill.blocks(model)
        decode = config.decode.blocks(model) + config.decode.swap_blocks
        for role, blocks in (("prefill", prefill), ("decode", decode)):
            kv = info.kv_bytes(blocks, model.kv_block_tokens)
            needed |= {worker.name: weights + kv for worker in plan.workers if worker.role == role}
    return needed


def _weights_bytes(model: ModelSection) -> int:
    """Of its files; of a packaged model, which may not be converted yet, by its shapes."""
    if model.name != smollm.NAME:
        return sum(path.stat().st_size for path in Path(model.name).glob("*.safetensors"))
    info, shapes = ModelInfo.read(model.name), smollm.CONFIG
    attention = 2 * info.hidden * (info.heads + info.kv_heads) * info.head_dim
    mlp = 3 * info.hidden * int(shapes["intermediate_size"])
    return 4 * (info.layers * (attention + mlp) + info.vocabulary * info.hidden)
