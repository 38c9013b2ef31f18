"""Tests of the default service times against what was measured, and of models that span several GPUs."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from runtime.simulator.capacity import demands
from runtime.simulator.node import simulate
from runtime.simulator.plan import plans
from runtime.simulator.setup import Setup
from runtime.simulator.times.collectives import Collectives
from runtime.simulator.times.service import H100_8B, ServiceTimes
from runtime.simulator.traces import Arrival
from tests.simulator.nodes import config, poisson, setup

MEASURED = (Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-h200.md").read_text()
TOKEN_BYTES = 2 * 4096  # of a token's activations in `H100_8B`


def measured(what: str) -> float:
    """Return the first number of a row of the H200's table, in seconds."""
    found = re.search(rf"\| {what} \| ([\d.,]+) (ms|µs)", MEASURED)
    assert found, what
    return float(found[1].replace(",", "")) * {"ms": 1e-3, "µs": 1e-6}[found[2]]


@pytest.mark.parametrize(
    ("before", "tokens", "row"),
    [*((0, tokens, f"prefill {tokens} tokens") for tokens in (128, 512, 2048)), (2048, 512, "prefill 512 behind 2048")],
)
def test_prompts_and_chunks_after_others_take_what_an_h200_took(before: int, tokens: int, row: str) -> None:
    times = ServiceTimes()
    assert times.prefill_pass_s + times.prefill_s(before, tokens) == pytest.approx(measured(row), rel=0.05)


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
@pytest.mark.parametrize("context", [256, 2048])
def test_steps_take_what_an_h200_took(rows: int, context: int) -> None:
    took = ServiceTimes().decode_s(rows, rows * context)
    assert took == pytest.approx(measured(f"decode {rows} rows at {context}"), rel=0.25)


def test_a_hand_over_takes_what_an_h200_took_with_blocks_in_order() -> None:
    times = ServiceTimes()
    took = measured("512 tokens, 128 MiB, blocks in order: whole, p50")
    assert (128 << 20) / times.link_bytes_s == pytest.approx(took, rel=0.01)


@pytest.mark.parametrize("times", [ServiceTimes(), H100_8B])
def test_a_search_beside_a_busy_model_waits_for_one_turn_of_it(times: ServiceTimes) -> None:
    """On an H200 a launch waited for a turn: a search of 41 launches took 99.7 ms. Now it is one launch."""
    extends, turn_s = 41, 99.7e-3 / 41
    alone_s = extends * times.extend_time_s(1)
    assert times.extend_shared * alone_s == pytest.approx(alone_s + turn_s, rel=0.05)


# ---- tensor and expert parallelism


def alone(made: Setup, prompt: int, output: int) -> tuple[float, float]:
    """Return TTFT and TPOT of a request that has the node to itself, without retrieval."""
    made = replace(made, workload=replace(made.workload, retrieval=False))
    result = simulate(made, [Arrival(0.0, prompt, output), Arrival(100.0, prompt, output)])
    return result.ttft_s.p50, result.tpot_s.p50


def node(collectives: Collectives, pools: int = 1) -> Setup:
    """Return a node of eight GPUs with independent pool workers; other times than a token's are 0."""
    times = replace(
        H100_8B, prefill_pass_s=0.0, prefill_pair_s=0.0, decode_context_s=0.0, kv_token_bytes=0.0, link_s=0.0
    )
    made = replace(setup(node=config(pools=pools)), times=times, collectives=collectives)
    return made.with_collectives(8)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_tensor_parallelism_divides_the_computing_and_adds_two_all_reduces_a_layer(gpus: int) -> None:
    one, many = alone(node(Collectives()), 400, 101), alone(node(Collectives(tensor=gpus)), 400, 101)
    moved = 32 * 2 * 2 * (gpus - 1) / gpus * TOKEN_BYTES / H100_8B.link_bytes_s
    prefill_s = 400 * (H100_8B.prefill_token_s / gpus + moved)
    step_s = (H100_8B.decode_step_s + H100_8B.decode_row_s) / gpus + moved
    assert one == pytest.approx((400 * H100_8B.prefill_token_s, H100_8B.decode_step_s + H100_8B.decode_row_s), rel=1e-3)
    assert many == pytest.approx((prefill_s, step_s), rel=1e-3)


@pytest.mark.parametrize("pools", [1, 2])
def test_an_independent_pool_sends_its_gpus_share_of_the_experts_bytes_over_the_network(pools: int) -> None:
    dense, mixture = alone(node(Collectives(), pools), 400, 101), alone(node(Collectives(experts=8), pools), 400, 101)
    crossing = 32 * 2 * 8 * TOKEN_BYTES * pools / 8
    longer_s = crossing * (1 / H100_8B.network_bytes_s - 1 / H100_8B.link_bytes_s)
    assert mixture[0] - dense[0] == pytest.approx(400 * longer_s, rel=1e-3)
    assert mixture[1] - dense[1] == pytest.approx(longer_s, rel=1e-3)


def test_a_pool_beside_models_displaces_no_experts() -> None:
    beside = replace(setup(node=config(placement="coupled")), collectives=Collectives(experts=8))
    assert beside.with_collectives(8).times == beside.times
    partly = replace(setup(node=config(placement="with-prefill+own")), collectives=Collectives(experts=8))
    assert partly.with_collectives(8).times.decode_row_s > partly.times.decode_row_s


def test_a_plan_gives_each_model_worker_its_gpus_and_charges_an_independent_pool_for_displaced_experts() -> None:
    arrivals = poisson(60, 5.0)
    plain, split = (plans(replace(setup(), collectives=made), arrivals, gpus=7, tried=1) for made in (
        Collectives(), Collectives(tensor=2, experts=8)
    ))  # fmt: skip
    assert all(2 * (plan.prefill + plan.decode) + plan.pool in (6, 7) for plan in split)
    assert all(plan.prefill + plan.decode + plan.pool == 7 for plan in plain)


def test_each_stages_queries_load_its_own_pool_workers() -> None:
    """Capacity's demand of the pool is that of the busiest worker; beside a model it is slowed, and slows the model."""
    arrivals = poisson(50, 5.0)
    own = demands(setup(node=config(prefill=2, pools=2)), arrivals)
    beside = demands(setup(node=config(prefill=2, pools=2, placement="with-prefill+own")), arrivals)
    only = demands(setup(node=config(prefill=2, pools=2, placement="with-prefill")), arrivals)
    assert beside["prefill"] > own["prefill"]
    assert beside["prefill"] < only["prefill"], "decode's probes are elsewhere"
    assert beside["decode"] == own["decode"]
