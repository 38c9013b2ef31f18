"""Capacity of a node by the utilisation law: the request rate at which its bottleneck resource is saturated."""

from collections.abc import Sequence

from ipc import Stage
from runtime.node.placement.pool_placement import PAIRED_ROLES, first_pools, pool_stages
from runtime.node.worker_config import SEARCH_WIDTH
from runtime.simulator.setup import Setup
from runtime.simulator.stages.pool import slots_of
from runtime.simulator.traces import Arrival


def demands(setup: Setup, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Return the mean service demand of a request at each resource in seconds: prefill, decode (slots), pool, link.

    Assumes full batches and passes, the lower bound; waits cost nothing. A pool that shares GPUs adds to their demand
    ("pool" is then its share of them).
    """
    config, times, work = setup.config, setup.times, setup.workload
    n = len(arrivals)
    prompt = sum(arrival.prompt_tokens for arrival in arrivals) / n
    output = sum(arrival.output_tokens for arrival in arrivals) / n
    chunk, slots = config.prefill.pass_tokens, config.decode.slots
    prefill = sum(
        times.prefill_s(0, arrival.prompt_tokens) + times.prefill_pass_s * arrival.prompt_tokens / chunk
        for arrival in arrivals
    )
    every = work.probe_every_tokens if work.retrieval else 0
    probes = sum((arrival.output_tokens - 1) // every for arrival in arrivals) / n if every else 0.0
    # rows weigh in proportion to their residence time: contexts weighted by output
    weighted = sum(arrival.output_tokens * (arrival.prompt_tokens + arrival.output_tokens / 2) for arrival in arrivals)
    context = weighted / (n * output)
    found_tokens = work.probe_tokens
    step = times.decode_s(slots, round(slots * (context + probes / 2 * work.probe_hit * found_tokens)))
    append = probes * work.probe_hit * times.prefill_s(round(context), found_tokens)  # delays the whole batch
    limits = config.pool
    extends = -(-limits.top_m // SEARCH_WIDTH) + 2
    width = slots_of(limits, times)
    query = extends * (times.extend_time_s(width) + times.round_s) / width + times.query_s
    searches, probe_searches = (query, probes * query) if work.retrieval else (0.0, 0.0)
    demand = {
        "prefill": prefill / n / config.prefill.workers,
        "decode": (output * step / slots + append) / config.decode.workers,
        "pool": 0.0,
        "link": times.copy_s(round(prompt)) / config.decode.workers,
    }
    stages = pool_stages(limits, {"prefill": config.prefill.workers, "decode": config.decode.workers})
    of_pool = [0.0] * len(stages)  # of each pool worker
    asked: dict[Stage, float] = {"prefill": searches, "decode": probe_searches}
    for stage, seconds in asked.items():
        first = first_pools(stages, stage)
        for number in first:
            of_pool[number] += seconds / len(first)
    for served, seconds in zip(stages, of_pool, strict=True):
        shared = served in PAIRED_ROLES[limits.placement]
        demand["pool"] = max(demand["pool"], seconds * times.extend_shared if shared else seconds)
        if shared:
            demand[served] += seconds / stages.count(served)
    return demand


def capacity(setup: Setup, arrivals: Sequence[Arrival]) -> float:
    """Return the requests/s that saturate the bottleneck resource; above it queues grow without bound."""
    return 1 / max(demands(setup, arrivals).values())
