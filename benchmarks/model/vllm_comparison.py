"""Our model beside vLLM's build for CPUs: the same tokens, weights in bfloat16, computed on one and the same core.

vLLM computes with one thread, on the core that we have too; its other processes may use every core. Both are asked in
turn, and while one computes the other waits.
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

_SIDE = Path(__file__).with_name("vllm_process.py")
_REST_S = 1.2  # before a run: behind its last request vLLM's worker looks for the next one without sleeping for 1 s


class Vllm:
    """A vLLM in a process of its own, which `with` ends."""

    def __init__(self, python: str, model: Path, core: int, *, eager: bool) -> None:
        given = {
            "model": str(model), "dtype": "bfloat16", "max_model_len": 1024, "enforce_eager": eager,
            "enable_prefix_caching": False, "disable_log_stats": True,
        }  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        self._process = subprocess.Popen(
            [python, str(_SIDE), json.dumps(given)],
            env=kept | {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._eager = eager

    def ready(self) -> None:
        """Wait for it. Raises RuntimeError if it ends first."""
        self._answer()

    def asked(self, prompts: Sequence[Tokens], tokens: int) -> list[Tokens]:
        """So many greedy tokens behind each."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "tokens": tokens}), file=self._process.stdin, flush=True)
        found: list[Tokens] = self._answer()
        return found

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"vLLM ended with {self._process.wait()}; run {_SIDE} by hand to see why")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure_vllm(ours: Ours, python: str, model: Path, random: np.random.Generator, rounds: int, steps: int) -> None:
    """Milliseconds of a prompt and a step: ours, vLLM's without and with torch.compile, its better one to ours."""
    core = max(os.sched_getaffinity(0))
    with Vllm(python, model, core, eager=True) as eager, Vllm(python, model, core, eager=False) as compiled:
        for side in (eager, compiled):
            side.ready()
        os.sched_setaffinity(0, {core})  # only now: vLLM's processes have started with all cores
        rows = [_prompt(ours, (eager, compiled), length, random, rounds) for length in (128, 512)]
        rows += [_steps(ours, (eager, compiled), count, random, rounds, steps) for count in (1, 4, 8)]
    head = ("ms", "ours", "vLLM, eager", "vLLM, compiled", "its better one / ours")
    print("", *table(head, rows), sep="\n")


def _prompt(ours: Ours, theirs: Sequence[Vllm], length: int, random: np.random.Generator, rounds: int) -> Sequence[str]:
    prompts = random_prompts([length], ours.model, random)
    times = paired(
        [lambda: ours.prefill(prompts), *(lambda s=side: s.asked(prompts, 1) for side in theirs)], rounds, _REST_S
    )
    return _row(f"a prompt of {length}", [one.best for one in times])


def _steps(
    ours: Ours, theirs: Sequence[Vllm], rows: int, random: np.random.Generator, rounds: int, steps: int
) -> Sequence[str]:
    """A step of vLLM's is what an answer takes longer for `steps` tokens more."""
    prompts = random_prompts([128] * rows, ours.model, random)
    first = ours.prefill(prompts)
    runs = [lambda: ours.decode(prompts, first, steps)]
    for side in theirs:
        runs += [lambda s=side: s.asked(prompts, 1), lambda s=side: s.asked(prompts, 1 + steps)]  # type: ignore[misc]
    mine, *rest = paired(runs, rounds, _REST_S)
    theirs_s = [_longer(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
    return _row(f"a step of {rows} rows", [mine.best / steps, *(seconds / steps for seconds in theirs_s)])


def _longer(one: Times, more: Times) -> float:
    return more.best - one.best


def _row(name: str, seconds: Sequence[float]) -> Sequence[str]:
    ours, *theirs = seconds
    return (name, *(f"{one * 1e3:.1f}" for one in seconds), f"{min(theirs) / ours:.2f}×")
