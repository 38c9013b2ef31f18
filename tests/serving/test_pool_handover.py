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
    assert workers.metric("prefill-0", PrefillMetrics.HANDOVERS["p2p"]) == 1
    workers.assert_nothing_held()
    others.close()
