"""Comparison with vLLM's CPU build: the same tokens, bfloat16 weights, on the same core.

vLLM computes with one thread on the core that our model uses; its other processes may use all cores. The two run in
alternation: one waits while the other computes.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.common.report import table
from benchmarks.model.driver import Ours, Times, Tokens, paired, random_prompts

_SCRIPT = Path(__file__).with_name("vllm_process.py")
_REST_S = 1.2  # before a run: vLLM's worker busy-waits for 1 s after its last request


class Vllm:
    """vLLM in a subprocess, which the context manager ends."""

    def __init__(self, python: str, model: Path, core: int, *, eager: bool) -> None:
        arguments = {
            "model": str(model), "dtype": "bfloat16", "max_model_len": 1024, "enforce_eager": eager,
            "enable_prefix_caching": False, "disable_log_stats": True,
        }  # fmt: skip
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")
        }
        self._process = subprocess.Popen(
            [python, str(_SCRIPT), json.dumps(arguments)],
            env=environment | {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._eager = eager

    def ready(self) -> None:
        """Wait until it has loaded. Raises RuntimeError if it exits."""
        self._answer()

    def generate(self, prompts: Sequence[Tokens], tokens: int) -> list[Tokens]:
        """Return `tokens` greedy tokens after each prompt."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "tokens": tokens}), file=self._process.stdin, flush=True)
        answers: list[Tokens] = self._answer()
        return answers

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"vLLM exited with {self._process.wait()}; run {_SCRIPT} by hand for its error")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure_vllm(ours: Ours, python: str, model: Path, random: np.random.Generator, rounds: int, steps: int) -> None:
    """Print milliseconds of a prompt and a step: ours, vLLM eager and compiled, and the better of these / ours."""
    core = max(os.sched_getaffinity(0))
    with Vllm(python, model, core, eager=True) as eager, Vllm(python, model, core, eager=False) as compiled:
        for side in (eager, compiled):
            side.ready()
        os.sched_setaffinity(0, {core})  # after vLLM's processes have started with all cores
        rows = [_prompt(ours, (eager, compiled), length, random, rounds) for length in (128, 512)]
        rows += [_steps(ours, (eager, compiled), count, random, rounds, steps) for count in (1, 4, 8)]
    head = ("ms", "ours", "vLLM, eager", "vLLM, compiled", "its better one / ours")
    print("", *table(head, rows), sep="\n")


def _prompt(ours: Ours, theirs: Sequence[Vllm], length: int, random: np.random.Generator, rounds: int) -> Sequence[str]:
    prompts = random_prompts([length], ours.model, random)
    times = paired(
        [lambda: ours.prefill(prompts), *(lambda s=side: s.generate(prompts, 1) for side in theirs)], rounds, _REST_S
    )
    return _row(f"a prompt of {length}", [one.best for one in times])


def _steps(
    ours: Ours, theirs: Sequence[Vllm], rows: int, random: np.random.Generator, rounds: int, steps: int
) -> Sequence[str]:
    """Time a step. For vLLM it is the difference between answers of 1 and 1 + `steps` tokens, per token."""
    prompts = random_prompts([128] * rows, ours.model, random)
    first = ours.prefill(prompts)
    runs = [lambda: ours.decode(prompts, first, steps)]
    for side in theirs:
        runs += [lambda s=side: s.generate(prompts, 1), lambda s=side: s.generate(prompts, 1 + steps)]  # type: ignore[misc]
    mine, *rest = paired(runs, rounds, _REST_S)
    theirs_s = [_difference(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
    return _row(f"a step of {rows} rows", [mine.best / steps, *(seconds / steps for seconds in theirs_s)])


def _difference(one: Times, more: Times) -> float:
    return more.best - one.best


def _row(name: str, seconds: Sequence[float]) -> Sequence[str]:
    ours, *theirs = seconds
    return (name, *(f"{one * 1e3:.1f}" for one in seconds), f"{min(theirs) / ours:.2f}×")
