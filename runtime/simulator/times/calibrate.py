"""Calibration of service times on this machine: linear fits of the engine's extends and the model's passes.

Run it on an idle machine. Fits use the fastest of several repetitions, because other load only adds time. Memory sizes,
ring and embedder times are taken from `base`, the times of the pool's loop from its benchmark.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from gpu import GraphIndex, open_engine
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig
from runtime.node.engine_config import BLOCK_TOKENS, ModelSection
from runtime.node.worker_config import SEARCH_WIDTH, PoolSection
from runtime.pool.sizing import LOOP_NS, ExtendCost, measure
from runtime.retrieval.collections.reader import CollectionReader
from runtime.simulator.times.service import ServiceTimes

_REPEAT = 3
_SLOTS = {True: 32, False: 512}  # on a CPU and on a GPU, if the pool chooses its slots itself
_LOOP = {"query_s": 2e-6, "round_s": 0.3e-6, "wake_s": 1e-4}  # docs/benchmarks.md, "Pool": a few µs beside milliseconds

Progress = Callable[[str], None]


def costs(parts: Sequence[Sequence[float]], took: Sequence[float]) -> list[float]:
    """Return the cost of each part from measurements of `took[i]` with `parts[i]` parts: least squares of relative
    errors with non-negative costs."""
    matrix = np.asarray(parts, float) / np.asarray(took)[:, None]
    result, left = np.zeros(matrix.shape[1]), list(range(matrix.shape[1]))
    while left:
        values = np.linalg.lstsq(matrix[:, left], np.ones(len(took)), rcond=None)[0]
        if values.min() >= 0:
            result[left] = values
            break
        left.pop(int(values.argmin()))
    return [float(value) for value in result]


def prefill_parts(chunks: Sequence[tuple[int, int]]) -> list[float]:
    """Return the parts of passes of one chunk (start, tokens) each: passes, tokens, tokens after others, pairs."""
    return [
        float(len(chunks)),
        float(sum(tokens for _, tokens in chunks)),
        float(sum(tokens for start, tokens in chunks if start)),
        sum(tokens * (start + tokens / 2) for start, tokens in chunks),
    ]


def calibrate(config: NodeConfig, base: ServiceTimes, progress: Progress = lambda text: None) -> ServiceTimes:
    """Measure the first collection and the model of `config`.

    Only one shard of a sharded collection is measured: a pool worker searches one, and all have the same size. Raises
    `ConfigError` if `config` has neither collections nor a model.
    """
    if not config.collections and config.own_model is None:
        raise ConfigError("nothing to calibrate: configure [model], [[collections]], or both")
    times, parts = base, []
    if config.collections:
        collection = config.collections[0]
        progress(f"extends of collection {collection.name!r}")
        with CollectionReader(Path(collection.path)) as opened:
            index = opened.state.segments[0].index  # a pool worker has one shard, and this is the largest
            measured = search_times(index, config.pool)
        fixed, each = costs(
            [(1, one.active) for one in measured], [(one.extend_ns - LOOP_NS) / 1e9 for one in measured]
        )
        times = replace(times, extend_s=fixed, extend_slot_s=each, **_LOOP)
        parts.append(f"extends of {collection.name}")
    if config.own_model is not None:
        progress(f"passes of model {config.own_model.name!r}")
        times = _model_times(config.own_model, config, times)
        parts.append(f"passes of {config.own_model.name}")
    return replace(times, source=f"measured on this machine: {', '.join(parts)}; the rest from: {base.source}")


def search_times(index: GraphIndex, pool: PoolSection) -> list[ExtendCost]:
    """Measure extends by active slots on the first pool worker's device, as a pool does at its start."""
    device = pool.devices[0]
    engine = open_engine(
        device,
        {"docs": index},
        slots=pool.slots if isinstance(pool.slots, int) else _SLOTS[device == "cpu"],
        max_top_m=pool.top_m,
        max_k=1,
        max_search_width=SEARCH_WIDTH,
    )
    try:
        backend, slots = engine.backend(), engine.free_slots
        return measure(backend, index.data, backend.number("docs"), pool.top_m, SEARCH_WIDTH, slots)
    finally:
        engine.close()


def _starts(far: int) -> list[int]:
    """Return start positions of chunks after earlier positions."""
    return sorted({max(1, far // part) for part in (8, 2, 1)}) if far > 0 else []


def _model_times(section: ModelSection, config: NodeConfig, times: ServiceTimes) -> ServiceTimes:
    from runtime.serving.kv.transport import Transfer
    from runtime.serving.model.language_model import Chunk, LanguageModel
    from runtime.serving.model.model_info import weights_type

    rows = config.decode.slots
    model = LanguageModel.load(
        section.name,
        blocks=rows * section.row_blocks(),
        block_tokens=BLOCK_TOKENS,
        context_tokens=section.context_tokens,
        threads=config.prefill.threads,
        device=config.decode.devices[0],
        weights=weights_type(section.weights, config.decode.devices[0]),
    )
    tables = [range(row * section.row_blocks(), (row + 1) * section.row_blocks()) for row in range(rows)]
    longest = min(config.prefill.pass_tokens, section.context_tokens // 2)
    if config.decode.devices[0] != "cpu":
        for _ in model.compile(range(min(4, model.blocks)), rows=rows, tokens=longest):
            pass

    def seconds(chunks: list[Chunk]) -> float:
        best = float("inf")
        for _ in range(_REPEAT):
            begin = time.perf_counter()
            model.forward(chunks)
            best = min(best, time.perf_counter() - begin)
        return best

    def prompt(start: int, tokens: int) -> float:
        return seconds([Chunk(tables[0], start, [1] * tokens)])

    def step(active: int, context: int) -> float:
        return seconds([Chunk(table, context, [1]) for table in tables[:active]])

    prompt(0, 2)
    lengths = sorted({max(1, longest // part) for part in (16, 8, 4, 2, 1)})
    prompts = [prompt(0, length) for length in lengths]
    chunks = [(0, length) for length in lengths]
    chunks += [(start, length) for start in _starts(section.context_tokens - longest) for length in lengths[-2:]]
    took = [*prompts, *(prompt(*chunk) for chunk in chunks[len(prompts) :])]
    pass_s, token_s, behind_s, pair_s = costs([prefill_parts([chunk]) for chunk in chunks], took)
    active = sorted({1, max(1, rows // 4), max(1, rows // 2), rows})
    step_s, row_s = costs([(1, count) for count in active], [step(count, 16) for count in active])
    deep = section.context_tokens - 2
    context_s = max(0.0, step(rows, deep) - step(rows, 16)) / (rows * max(deep - 16, 1))
    if config.decode.devices[0] == "cpu":  # one process cannot measure the link between two GPUs
        kv = model.kv.numpy()
        target = np.zeros_like(kv[:, :, : section.row_blocks()])
        copies = [Transfer(kv, tables[0], target, tables[0]) for _ in range(_REPEAT)]
        for copy in copies:
            copy.step()
        copied, copy_ns = copies[0].bytes, min(copy.busy_ns for copy in copies)
        times = replace(times, link_bytes_s=copied * 1e9 / max(copy_ns, 1), link_s=0.0)
    return replace(
        times,
        prefill_pass_s=pass_s,
        prefill_token_s=token_s,
        prefill_behind_s=behind_s,
        prefill_pair_s=pair_s,
        decode_step_s=step_s,
        decode_row_s=row_s,
        decode_context_s=context_s,
        kv_token_bytes=model.kv.nbytes // (model.blocks * model.block_tokens),
    )
