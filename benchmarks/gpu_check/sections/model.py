"""The language model on the device: tokens against transformers there and on the CPU; synchronisations of a step."""

import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check.report import Outcome, micros
from benchmarks.gpu_check.setup import Setup
from benchmarks.gpu_check.time_limit import Skipped

_BLOCK, _CONTEXT, _ANSWER = 16, 512, 24
_TOLERANCE = 1e-3  # of logits, relative to the largest


def check(setup: Setup, outcome: Outcome) -> None:
    """Serve ragged prompts in chunks, batched, with a random Llama. Raises AssertionError if tokens differ."""
    device = torch_device(setup)
    from runtime.serving.model.language_model import LanguageModel
    from runtime.testing.reference import Reference
    from runtime.testing.tiny_model import make_tiny_llama

    random = np.random.default_rng(0)
    sizes = (1, 5, 40) if setup.small else (1, 2, 17, 40, 100, 130, 200, 317)
    prompts: list[list[int]] = [random.integers(0, 259, size).tolist() for size in sizes]
    each = _CONTEXT // _BLOCK
    with tempfile.TemporaryDirectory() as folder:
        layers, hidden = (2, 64) if setup.small else (8, 512)
        directory = make_tiny_llama(Path(folder), seed=1, layers=layers, hidden=hidden)
        model = LanguageModel.load(
            directory, blocks=each * len(prompts), block_tokens=_BLOCK, context_tokens=_CONTEXT, device=device,
            kernels="paged" if setup.on_gpu else "gathered",
        )  # fmt: skip
        if setup.on_gpu:
            for _ in model.compile(range(4), rows=len(prompts), tokens=_CONTEXT):
                pass
        outcome.add("attention of single tokens", f"{model.kernels}, {model.kv.dtype}".replace("torch.", ""))
        references = {"transformers on the CPU": Reference(directory)}
        if setup.on_gpu:
            references["transformers on the device"] = Reference(directory, device)
        blocks = np.random.default_rng(1).permutation(model.blocks).tolist()
        tables = [blocks[row * each : (row + 1) * each] for row in range(len(prompts))]
        answers, logits = _serve(model, tables, prompts)
        for name, reference in references.items():
            expected = [reference.generate(prompt, _ANSWER) for prompt in prompts]
            theirs = [reference.logits(prompt)[-1].cpu() for prompt in prompts]
            far = max(
                float((mine - other).abs().max() / other.abs().max())
                for mine, other in zip(logits, theirs, strict=True)
            )
            same = sum(mine == other for mine, other in zip(answers, expected, strict=True))
            outcome.add(f"same greedy tokens as {name}", f"{same} of {len(prompts)} prompts")
            outcome.add("… largest difference of a logit, of the largest", f"{far:.1e}")
            outcome.data[name] = {"same": same, "logits": far}
            assert far < _TOLERANCE, f"a logit differs by {far:.1e} of the largest from {name}"
            assert same == len(prompts), f"only {same} of {len(prompts)} answers match {name}"
        step_s, waits = _step(model, tables, prompts, setup.on_gpu)
        outcome.add(f"decode step of {len(prompts)} rows, p50", micros(step_s))
        waited = "skipped: no GPU" if waits is None else f"{waits} (1: the logits)"
        outcome.add("… waits for the device in it", waited)
    outcome.data |= {"step_s": step_s, "waits": waits}


def torch_device(setup: Setup) -> str:
    """Return torch's name of the device. Raises Skipped if torch cannot use it."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise Skipped(f"the model needs {error.name}: the extra [llm]") from None
    del transformers
    if not setup.on_gpu:
        return "cpu"
    if not torch.cuda.is_available():
        raise Skipped(f"this torch ({torch.__version__}) has no CUDA here")
    from gpu.cuda.cuda_driver import find_device

    return f"cuda:{find_device(setup.device)}"


def _serve(
    model: Any, tables: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[Any]]:
    """Return greedy answers and the logits after each prompt. Chunk sizes differ, so passes mix prefill and decode."""
    from runtime.serving.model.language_model import Chunk

    contexts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    logits: list[Any] = [None] * len(prompts)
    while rows := [row for row, prompt in enumerate(prompts) if len(contexts[row]) < len(prompt) + _ANSWER]:
        chunks = [
            Chunk(tables[row], done[row], contexts[row][done[row] : done[row] + 30 + 11 * (row % 3)]) for row in rows
        ]
        for row, chunk, scores in zip(rows, chunks, model.forward(chunks), strict=True):
            done[row] += len(chunk.tokens)
            if done[row] == len(contexts[row]):
                logits[row] = scores if logits[row] is None else logits[row]
                contexts[row].append(int(scores.argmax()))
    return [context[len(prompt) :] for context, prompt in zip(contexts, prompts, strict=True)], logits


def _step(
    model: Any, tables: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], on_gpu: bool
) -> tuple[float, int | None]:
    """Return the seconds of a decode step, and its number of device synchronisations."""
    import torch

    from runtime.serving.model.language_model import Chunk

    chunks = [Chunk(table, len(prompt), [1]) for table, prompt in zip(tables, prompts, strict=True)]
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        model.forward(chunks)
        times.append(time.perf_counter() - begin)
    if not on_gpu:
        return float(np.median(times)), None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.forward(chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    return float(np.median(times)), waits
