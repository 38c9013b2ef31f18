"""Duration of a decode step while a prompt's KV is pulled, against one without."""

import time

import numpy as np

from benchmarks.common.stepped_workers import SteppedWorkers
from benchmarks.serve.bench import CONTEXT_TOKENS, Bench
from benchmarks.serve.report import Measure, Section, percentile
from runtime.serving.decode.process import DecodeWorker
from runtime.serving.model.model_info import model_directory

_ROWS = 8


def run(bench: Bench) -> Section:
    """Run both workers in this process, to control and time their steps."""
    section = Section(
        "step",
        f"Decode's rounds with {_ROWS} rows while the KV of a long prompt is copied in slices between them, against "
        "rounds without, in turn.",
    )
    long = bench.long_prompt_tokens
    workers = SteppedWorkers(
        model_directory(bench.model), context=CONTEXT_TOKENS, block=32,
        prefill={"slots": 2}, decode={"slots": _ROWS + 1},
    )  # fmt: skip
    try:
        random = np.random.default_rng(bench.seed)
        rows = CONTEXT_TOKENS - 64
        for number in range(_ROWS):
            workers.submit(f"row{number}", random.integers(3, bench.info.vocabulary, 32).tolist(), rows)
        decode = workers.decodes["decode-0"]
        while decode._batch.running < _ROWS:
            workers.round()
        without: list[float] = []
        within: list[float] = []
        rounds = bench.count(24, least=6)
        for number in range(rounds):
            workers.submit(f"long{number}", random.integers(3, bench.info.vocabulary, long).tolist(), 1)
            workers.offer(f"long{number}")
            decode.handovers.receive(decode.link.frontend_epoch)
            pulled: list[float] = []
            while not pulled or decode.handovers.pulling or decode.handovers.waiting:
                pulled.append(_timed(decode))
            within += pulled
            without += [_timed(decode) for _ in pulled]
            workers.round()
    finally:
        workers.close()
    section.measures = [
        Measure("a round with a hand-over in flight, p50", percentile(within, 50) * 1e3, "ms"),
        Measure("a round without, p50", percentile(without, 50) * 1e3, "ms"),
        Measure("with / without", percentile(within, 50) / percentile(without, 50), "×", "≤", 1.15),
    ]
    section.details = {"with_s": within, "without_s": without, "rounds_of_a_hand_over": len(within) / rounds}
    return section


def _timed(decode: DecodeWorker) -> float:
    begin = time.perf_counter()
    decode.step()
    return time.perf_counter() - begin
