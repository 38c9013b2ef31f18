"""Tests that the simulated node agrees with the real workers' loops: same requests and same costs of passes, steps and
queries, on a virtual clock. Interactions and the timing of messages are each side's own."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.node.config import parse_config
from runtime.node.engine_config import BLOCK_TOKENS
from runtime.serving import stages
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.times.service import H100_8B
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Slos, Workload
from runtime.testing.tiny_model import make_tiny_llama
from tests.simulator.virtual_workers import run_workers, spans

EXTEND_S = 10e-6  # 42 to 44 extends per query
TIMES = replace(
    H100_8B,
    prefill_pass_s=2e-3, prefill_token_s=100e-6, prefill_behind_s=50e-6, prefill_pair_s=10e-9, decode_step_s=2e-3,
    decode_row_s=200e-6, decode_context_s=200e-9, kv_token_bytes=0.0, link_s=0.0, embed_s=1e-3,
    ring_s=5e-6, extend_s=EXTEND_S, extend_slot_s=0.0,
)  # fmt: skip
SECTIONS: dict[str, Any] = {
    "prefill": {"slots": 8, "chunk_tokens": 256},
    "decode": {"slots": 32},
    "http": {"max_in_flight": 10_000},
    "kv": {"host_mib": 0},
}
EVERY = 8
PROBE = 64  # tokens
BLOCK = BLOCK_TOKENS
MEAN_S = 2e-3 + 300 * 130e-6  # prefill time per request; prefill is the bottleneck here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def arrivals(load: float, count: int = 120) -> list[Arrival]:
    random, at_s, found = Random(3), 0.0, []
    for _ in range(count):
        at_s += random.expovariate(load / MEAN_S)
        found.append(Arrival(round(at_s, 9), random.randint(40, 560), random.randint(4, 60)))
    return found


@pytest.mark.parametrize(
    ("load", "passages", "disaggregate"),
    [(0.4, False, "always"), (0.4, True, "auto"), (0.8, False, "never"), (0.8, True, "always")],
)
def test_first_and_later_tokens_agree_with_the_real_workers_loops(
    load: float, passages: bool, disaggregate: str, model: Path
) -> None:
    sections = SECTIONS | {"handover": {"disaggregate": disaggregate}}
    requests = arrivals(load)
    tokens = {round(arrival.at_s * 1e9): arrival.output_tokens for arrival in requests}
    search_s = 43 * EXTEND_S + 2 * TIMES.ring_s
    done, _ = run_workers(model, TIMES, requests, search_s=search_s, every=EVERY, passages=passages, **sections)
    real = spans(done, tokens)
    workload = Workload(probe_every_tokens=EVERY, probe_hit=float(passages), probe_tokens=PROBE)
    config = parse_config(sections)
    slos = Slos(tpot_s=config.slo.tpot_s)
    simulation = Simulation(Setup(config=config, times=TIMES, workload=workload, slos=slos), requests)
    simulation.run()
    simulated = {
        "ttft": [request.ttft_s * 1e3 for request in simulation.requests],
        "tpot": [request.tpot_s * 1e3 for request in simulation.requests],
    }
    by_decode = [sum(stages.HANDOVER_END not in one for one in done), sum(r.by_decode for r in simulation.requests)]
    assert abs(by_decode[0] - by_decode[1]) <= 0.05 * len(requests), "the same rule on nearly the same state"
    assert (by_decode[0] > 0) == (disaggregate != "always")
    for name, theirs in real.items():
        for percent in (50, 95):
            ours, wanted = (float(np.percentile(values, percent)) for values in (simulated[name], theirs))
            near = 0.1 if percent == 50 or disaggregate == "always" else 0.16
            assert ours == pytest.approx(wanted, rel=near), f"{name} p{percent}"


def conversations(count: int = 150) -> list[Arrival]:
    """Return turns of conversations, each of which begins with the whole previous turn, and the first with one of a few
    system prompts. Blocks have a real worker's size."""
    random, at_s, known = Random(5), 0.0, dict[int, list[int]]()
    found = []
    for number in range(count):
        at_s += random.expovariate(0.5 / MEAN_S)
        talk = random.randrange(12)
        prefix = known.setdefault(talk, [talk % 3])
        prefix += [100 + number * 4 + i for i in range(random.randint(1, 4))]
        if len(prefix) > 30:
            del prefix[1:]
        prompt = len(prefix) * BLOCK + random.randint(0, BLOCK - 1)
        found.append(Arrival(round(at_s, 9), prompt, random.randint(4, 30), tuple(prefix), BLOCK))
    return found


@pytest.mark.parametrize(
    ("disaggregate", "worker", "kv_blocks"),
    [("always", "prefill-0", 512), ("never", "decode-0", 100)],
)
def test_prefix_hits_agree_with_those_of_the_real_workers(
    disaggregate: str, worker: str, kv_blocks: int, model: Path
) -> None:
    sections = SECTIONS | {"handover": {"disaggregate": disaggregate}}
    sections["prefill"] = SECTIONS["prefill"] | {"kv_blocks": kv_blocks}
    requests = conversations()
    real = run_workers(model, TIMES, requests, search_s=43 * EXTEND_S, every=0, passages=False, **sections)
    simulation = Simulation(
        Setup(config=parse_config(sections), times=TIMES, workload=Workload(probe_every_tokens=0)), requests
    )
    simulation.run()
    found = sum(request.found_tokens for request in simulation.requests)
    prompt_tokens = sum(arrival.prompt_tokens for arrival in requests)
    assert found == pytest.approx(real.hit_tokens[worker], rel=0.03)
    assert 0.1 * prompt_tokens < found < 0.9 * prompt_tokens
    ttft = spans(real.done, {round(arrival.at_s * 1e9): arrival.output_tokens for arrival in requests})["ttft"]
    ours = [request.ttft_s * 1e3 for request in simulation.requests]
    assert float(np.median(ours)) == pytest.approx(float(np.median(ttft)), rel=0.1)
