"""A hand-over of 512 tokens between two processes, against one copy of its bytes."""

import time

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import sequential
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.system import SystemParts
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.tiny_model import make_tiny_llama

_TOKENS = 512


def run(bench: Bench) -> Section:
    """Time hand-overs on an idle node from the first sampled token until decode has all KV, alternating with copies."""
    section = Section(
        "handover",
        f"From the first token sampled in prefill until decode has the KV of {_TOKENS} tokens: offer, admission and "
        "pull. Against one copy of the same number of bytes within this process.",
    )
    # The tiny model has little KV; here the bytes should dominate, as with a real one (SmolLM2: 46 KB per token).
    wide = make_tiny_llama(bench.folder / "wide", layers=8, hidden=512) if not bench.real_model else None
    model = str(wide) if wide else bench.model
    info = ModelInfo.read(model)
    size = info.kv_bytes_per_token() * _TOKENS
    source, target = np.ones((4, size), np.uint8), np.zeros((4, size), np.uint8)
    random = np.random.default_rng(bench.seed)
    taken: dict[str, list[float]] = {"handover": [], "room": [], "pull": []}
    copies: list[float] = []
    parts = SystemParts(model, bench.parts.collection, bench.folder, bench.parts.context_tokens)
    with bench.system("node", parts=parts, handover={"disaggregate": "always"}) as system:
        for number in range(bench.count(24, least=6)):
            body = bench.body(random, _TOKENS, 2) | {"model": info.name}
            (outcome,) = sequential(system.url, [body])
            for name, values in taken.items():
                values.append(outcome.timings[name])
            begin = time.perf_counter()
            np.copyto(target[number % 4], source[number % 4])
            copies.append(time.perf_counter() - begin)
    copies = copies[4:] or copies  # without the page faults of each target's first copy
    section.measures = [Measure(f"{name} p50", percentile(values, 50) * 1e3, "ms") for name, values in taken.items()]
    section.measures += [
        Measure(f"one copy of {size / 1e6:.1f} MB, p50", percentile(copies, 50) * 1e3, "ms"),
        Measure("hand-over / copy", percentile(taken["handover"], 50) / percentile(copies, 50), "×", "≤", 3.0),
    ]
    section.details = taken | {"copy_s": copies, "bytes": size}
    return section
