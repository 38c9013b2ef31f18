"""Service times of the machine at hand: the engine's extends and the model's passes, each fitted by a line.

Run it on a machine that does nothing else. Fits take the fastest of some repetitions: what else runs only adds time.
Memory sizes, the ring and the embedder stay as they are in `base`.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from gpu import CpuEngine, GraphIndex, SearchParams
from runtime.errors import ConfigError
from runtime.node.config import ModelSection, NodeConfig
from runtime.retrieval.collection import Collection
from runtime.simulator.service import ServiceTimes

_REPEAT = 3
_ACTIVE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FIRST_EXTENDS = 8  # timed of each query: all of them are active for so long

Progress = Callable[[str], None]


class Line(msgspec.Struct, frozen=True):
    """y = fixed + each · x, neither below 0."""

    fixed: float
    each: float

    @classmethod
    def fit(cls, x: Sequence[float], y: Sequence[float]) -> "Line":
        """Least squares of relative errors, so that small values count as much as great ones."""
        weight = 1 / np.maximum(np.asarray(y), 1e-12)
        matrix = np.stack([weight, np.asarray(x) * weight], axis=1)
        fixed, each = np.linalg.lstsq(matrix, np.ones(len(x)), rcond=None)[0]
        if fixed < 0:
            return cls(0.0, float(np.mean(np.asarray(y) / np.asarray(x))))
        return cls(float(fixed), max(float(each), 0.0))


def calibrate(config: NodeConfig, base: ServiceTimes, progress: Progress = lambda text: None) -> ServiceTimes:
    """Measure what `config` names: its first collection and its model. Raises `ConfigError` if it names neither."""
    if not config.collections and config.model is None:
        raise ConfigError("nothing to calibrate: give a [model], [[collections]], or both")
    found, parts = base, []
    if config.collections:
        collection = config.collections[0]
        progress(f"extends of collection {collection.name!r}")
        with Collection.open(Path(collection.path)) as opened:
            line = extend_times(opened.index, config.pool.slots, config.pool.top_m, config.pool.search_width)
        found = replace(found, extend_s=line.fixed, extend_slot_s=line.each)
        parts.append(f"extends of {collection.name}")
    if config.model is not None:
        progress(f"passes of model {config.model.name!r}")
        found = _model_times(config.model, config, found)
        parts.append(f"passes of {config.model.name}")
    return replace(found, source=f"measured on this machine: {', '.join(parts)}; the rest from: {base.source}")


def extend_times(index: GraphIndex, slots: int, top_m: int, search_width: int) -> Line:
    """Seconds of one extend by active slots; the index's own vectors, disturbed, are the queries."""
    random = np.random.default_rng(0)
    counts = [count for count in _ACTIVE if count < slots] + [slots]
    engine = CpuEngine({"docs": index}, slots=slots, max_top_m=top_m, max_search_width=search_width, max_k=1)
    params = SearchParams(1, top_m, search_width)
    taken = []
    for count in counts:
        best = float("inf")
        for _ in range(_REPEAT):
            held = [engine.admit(random.standard_normal(index.dim, np.float32), params, "docs") for _ in range(count)]
            engine.extend()  # the first one takes up the seeds
            begin = time.perf_counter()
            extends = 0
            while extends < _FIRST_EXTENDS and engine.active_slots == count:
                engine.extend()
                extends += 1
            best = min(best, (time.perf_counter() - begin) / max(extends, 1))
            for slot in held:
                engine.release(slot)
        taken.append(best)
    return Line.fit(counts, taken)


def _model_times(section: ModelSection, config: NodeConfig, found: ServiceTimes) -> ServiceTimes:
    from runtime.serving.model.language_model import Chunk, LanguageModel

    rows = config.decode.slots
    model = LanguageModel.load(
        section.name, slots=rows, context_tokens=section.context_tokens, threads=config.prefill.threads
    )
    longest = min(config.prefill.chunk_tokens, section.context_tokens // 2)

    def seconds(chunks: list[Chunk]) -> float:
        best = float("inf")
        for _ in range(_REPEAT):
            begin = time.perf_counter()
            model.forward(chunks)
            best = min(best, time.perf_counter() - begin)
        return best

    def prompt(start: int, tokens: int) -> float:
        return seconds([Chunk(0, start, [1] * tokens)])

    def step(active: int, context: int) -> float:
        return seconds([Chunk(slot, context, [1]) for slot in range(active)])

    prompt(0, 2)
    lengths = [max(1, longest // 8), longest // 2, longest]
    passes = Line.fit(lengths, [prompt(0, length) for length in lengths])
    far = section.context_tokens - longest
    pair_s = max(0.0, prompt(far, longest) - prompt(0, longest)) / (longest * max(far, 1))
    active = sorted({1, max(1, rows // 2), rows})
    steps = Line.fit(active, [step(count, 16) for count in active])
    deep = section.context_tokens - 2
    context_s = max(0.0, step(rows, deep) - step(rows, 16)) / (rows * max(deep - 16, 1))
    copied = deep
    copy_s = float("inf")
    for _ in range(_REPEAT):
        begin = time.perf_counter()
        model.copy_kv(model.kv, 0, rows - 1, copied)
        copy_s = min(copy_s, time.perf_counter() - begin)
    return replace(
        found,
        prefill_pass_s=passes.fixed,
        prefill_token_s=passes.each,
        prefill_pair_s=pair_s,
        decode_step_s=steps.fixed,
        decode_row_s=steps.each,
        decode_context_s=context_s,
        kv_token_bytes=model.info.kv_bytes_per_token,
        link_bytes_s=copied * model.info.kv_bytes_per_token / max(copy_s, 1e-9),
        link_s=0.0,
    )
