"""Tests of KV tiers on the simulated node: evicted blocks, and blocks of other workers, are loaded."""

from dataclasses import replace as dated

from msgspec.structs import replace

from runtime.node.config import Disaggregate
from runtime.simulator.setup import Setup
from runtime.simulator.stages.decode import SimDecode
from runtime.simulator.stages.prefill import SimPrefill
from runtime.simulator.times.service import H100_8B, ServiceTimes
from tests.simulator.nodes import arrival, config, run, setup, without_retrieval

MS = 1_000_000
TIMES = replace(
    H100_8B,
    prefill_pass_s=0.0, prefill_token_s=1e-3, prefill_pair_s=0.0,  # 1 ms per token, 2 ms per block read or written
    decode_step_s=3e-3, decode_row_s=0.0, decode_context_s=0.0, kv_token_bytes=1.0, link_bytes_s=1e9, link_s=0.0,
    tier_block_s=2e-3, tier_write_bytes_s=1e15, tier_load_bytes_s=1e15,
)  # fmt: skip


def node(
    *, host_mib: int = 1, disaggregate: Disaggregate = "always", kv_blocks: int = 6, times: ServiceTimes = TIMES,
    prefill: int = 1, **rows: int,
) -> Setup:  # fmt: skip
    """Return a node. `kv_blocks`: of each prefill worker, and of decode's prompts; `rows`: decode's other settings."""
    made = config(prefill=prefill, decode=1, disaggregate=disaggregate, host_mib=host_mib)
    decode = replace(made.decode, **rows)
    if disaggregate == "never":
        decode = replace(decode, kv_blocks=kv_blocks)
    made = replace(
        made,
        prefill=replace(made.prefill, kv_blocks=kv_blocks),
        decode=decode,
        http=replace(made.http, overlap_weight=0.0),
    )
    return replace(without_retrieval(setup(node=made)), times=times)


VISITS = arrival(0.0, 96, 1, 2, 3), arrival(1.0, 96, 4, 5, 6), arrival(2.0, 96, 7, 8, 9), arrival(3.0, 96, 1, 2, 3)


def test_evicted_blocks_are_loaded_instead_of_computed() -> None:
    *_, again = run(node(), *VISITS).requests
    assert again.found_tokens == 64
    assert again.prefilled_ns - again.begun_ns == (2 * 2 + 32) * MS
    *_, again = run(node(host_mib=0), *VISITS).requests
    assert again.found_tokens == 0
    assert again.prefilled_ns - again.begun_ns == 96 * MS


def test_a_busy_worker_writes_for_a_thirtieth_of_its_time_and_an_idle_one_writes_everything() -> None:
    busy = run(node(kv_blocks=400), *(arrival(0.0, 3000, *range(n * 100, n * 100 + 94)) for n in range(4)))
    (prefill,) = busy.prefills.values()
    assert prefill.prompts is not None
    written_ns = prefill.prompts.tiers.count("stored") * 2 * MS
    assert 0.8 * prefill.busy_ns / 30 < written_ns < 1.2 * prefill.busy_ns / 30
    rested = run(node(), arrival(0.0, 96, 1, 2, 3), arrival(1.0, 1))
    workers: list[SimPrefill | SimDecode] = [*rested.prefills.values(), *rested.decodes.values()]
    kept = [worker.prompts for worker in workers if worker.prompts is not None]
    assert not any(prompts.unsaved for prompts in kept)
    assert sum(prompts.tiers.count("stored") for prompts in kept) == 3


def test_nothing_is_loaded_once_the_model_is_known_to_be_faster_than_its_tiers() -> None:
    slow = replace(TIMES, tier_block_s=40e-3)
    later = [dated(one, at_s=4.0 + n) for n, one in enumerate((*VISITS[1:3], VISITS[0]))]
    requests = run(node(times=slow), *VISITS, *later).requests
    assert requests[3].found_tokens == 64
    assert [one.found_tokens for one in requests[4:]] == [0, 0, 0]


def test_a_tier_evicts_the_least_recently_used_within_its_limit() -> None:
    mib = 1 << 20
    large = replace(TIMES, kv_token_bytes=1024.0, link_bytes_s=1e12)  # a block takes 32 KiB: 32 of them are 1 MiB
    prompts = [arrival(float(n), 96, 3 * n, 3 * n + 1, 3 * n + 2) for n in range(40)]
    simulation = run(
        node(times=large), *prompts, arrival(40.0, 96, *prompts[0].prefix), arrival(41.0, 96, *prompts[37].prefix)
    )
    (shelf,) = simulation.tiers.shared_tiers
    assert 0 < shelf.used_bytes <= mib
    assert [request.found_tokens for request in simulation.requests[-2:]] == [0, 64]
