"""Tests of hand-overs through the first KV tier: either worker may die while blocks wait there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.node.metrics.worker_metrics import DecodeMetrics, PrefillMetrics
from runtime.serving.kv.file_tier import FileTier
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.reference import Reference
from tests.serving.test_workers import ragged
from tests.serving.workers import Start, Workers

PROMPT = list(range(3, 203))  # 25 blocks


@pytest.fixture
def pooled(start: Start, tmp_path: Path) -> Callable[..., Workers]:
    def starting(host_mib: int = 64, **options: Any) -> Workers:
        return start(
            node={"run_dir": str(tmp_path)},
            kv={"host_mib": host_mib},
            handover={"mode": "pool", "disaggregate": "always"},
            **options,
        )

    return starting


def held(directory: Path) -> int:
    """Return how many blocks are held in the tier."""
    return sum(file.stat().st_mode & 0o777 == 0o400 for file in (directory / "kv").iterdir())


def handovers(workers: Workers) -> tuple[float, float]:
    """Return how many prompts were handed over through the pool, and otherwise."""
    pool, p2p = (workers.metric("prefill-0", PrefillMetrics.HANDOVERS[mode]) for mode in ("pool", "p2p"))
    return pool, p2p


@pytest.mark.parametrize("start", ["CPU", "GPU"], indirect=True)
def test_answers_equal_generate_through_the_pool(
    pooled: Callable[..., Workers], reference: Reference, tmp_path: Path
) -> None:
    workers = pooled(prefill={"slots": 3, "chunk_tokens": 48})
    prompts = ragged(24, seed=1)
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 20)
    workers.run()
    assert [workers.outputs[f"r{number}"].tokens for number in range(24)] == [
        reference.generate(prompt, 20) for prompt in prompts
    ]
    assert handovers(workers) == (24, 0)
    assert workers.metric("decode-0", DecodeMetrics.TIER_LOADED["host"]) > 0
    assert workers.metric("decode-0", DecodeMetrics.HANDOVER_BYTES) > 0
    assert held(tmp_path) == 0
    workers.assert_nothing_held()


def test_prefill_may_die_while_its_blocks_wait(
    pooled: Callable[..., Workers], reference: Reference, tmp_path: Path
) -> None:
    workers = pooled()
    workers.submit("a", PROMPT, 20)
    workers.offer("a")
    assert workers.held()["prefill-0"] == (0, 0), "it holds nothing"
    assert held(tmp_path) == 25
    workers.prefill.close()
    while not workers.outputs["a"].ended:
        workers.decodes["decode-0"].step()
        workers.receive()
    assert workers.outputs["a"].tokens == reference.generate(PROMPT, 20)
    assert workers.metric("decode-0", DecodeMetrics.TIER_LOADED["host"]) == 25
    assert held(tmp_path) == 0


@pytest.mark.parametrize("taken", [False, True])
def test_another_decode_worker_takes_the_blocks_of_a_dead_one(
    pooled: Callable[..., Workers], reference: Reference, tmp_path: Path, taken: bool
) -> None:
    workers = pooled(decodes=2)
    workers.submit("a", PROMPT, 20)
    workers.offer("a")
    workers.lose("decode-0", undelivered=int(taken))
    workers.restart("a", "decode-1")
    workers.run()
    assert workers.outputs["a"].tokens == reference.generate(PROMPT, 20)
    assert workers.metric("decode-1", DecodeMetrics.TIER_LOADED["host"]) == 25
    workers.settle()
    assert held(tmp_path) == 0


@pytest.mark.parametrize("taken", [False, True])
def test_the_blocks_of_a_cancelled_request_are_not_held(
    pooled: Callable[..., Workers], tmp_path: Path, taken: bool
) -> None:
    workers = pooled(decode={"slots": 1})
    workers.submit("a", PROMPT, 100)
    workers.offer("a")
    if taken:
        workers.decodes["decode-0"].step()
    workers.cancel("a")
    workers.assert_nothing_held()
    assert held(tmp_path) == 0


def test_a_prompt_for_which_the_pool_is_full_is_pulled_from_prefill(
    pooled: Callable[..., Workers], reference: Reference, tiny_directory: Path, tmp_path: Path
) -> None:
    workers = pooled(host_mib=1)
    block = bytes(ModelInfo.read(tiny_directory).kv_bytes(1, 8, "float32"))
    others = FileTier("host", tmp_path / "kv", 1 << 20, len(block), 16)
    while others.may_hold(1):
        assert others.store(os.urandom(16), memoryview(block), hold=True)
    workers.submit("a", PROMPT, 20)
    workers.run()
    assert workers.outputs["a"].tokens == reference.generate(PROMPT, 20)
    assert handovers(workers) == (0, 1)
    workers.assert_nothing_held()
    others.close()
