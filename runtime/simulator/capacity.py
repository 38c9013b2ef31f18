"""What a node can do at most, by the utilisation law: the rate at which its busiest resource has no time left."""

from collections.abc import Sequence

from ipc import Stage
from runtime.simulator.setup import Setup
from runtime.simulator.stages.pool import slots_of
from runtime.simulator.traces import Arrival


def demands(setup: Setup, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Seconds of each resource, as a whole, that a mean request takes: prefill, decode (its slots), pool, link.

    Full batches and full passes are assumed, the cheapest way to work; waits cost nothing. A pool that shares GPUs
    takes its time from them (and "pool" is then its share of those).
    """
    config, times, work = setup.config, setup.times, setup.workload
    n = len(arrivals)
    prompt = sum(arrival.prompt_tokens for arrival in arrivals) / n
    output = sum(arrival.output_tokens for arrival in arrivals) / n
    chunk, slots = config.prefill.expected_chunk_tokens, config.decode.slots
    prefill = sum(
        times.prefill_s(0, arrival.prompt_tokens) + times.prefill_pass_s * arrival.prompt_tokens / chunk
        for arrival in arrivals
    )
    every = work.probe_every_tokens if work.retrieval else 0
    probes = sum((arrival.output_tokens - 1) // every for arrival in arrivals) / n if every else 0.0
    # rows are met in proportion to the time they stay: contexts weighted by output
    weighted = sum(arrival.output_tokens * (arrival.prompt_tokens + arrival.output_tokens / 2) for arrival in arrivals)
    context = weighted / (n * output)
    found_tokens = config.decode.probe_tokens
    step = times.decode_s(slots, round(slots * (context + probes / 2 * work.probe_hit * found_tokens)))
    append = probes * work.probe_hit * times.prefill_s(round(context), found_tokens)  # holds up the whole batch
    limits = config.pool
    extends = -(-limits.top_m // limits.search_width) + 2
    width = slots_of(limits, times)
    query = extends * (times.extend_time_s(width) + times.round_s) / width + times.query_s
    ask, probing = (query, probes * query) if work.retrieval else (0.0, 0.0)
    found = {
        "prefill": prefill / n / config.prefill.workers,
        "decode": (output * step / slots + append) / config.decode.workers,
        "pool": (ask + probing) / max(config.pool.workers, 1),
        "link": times.copy_s(round(prompt)) / config.decode.workers,
    }
    if (placement := limits.placement) in ("with-prefill", "with-decode"):
        role: Stage = "prefill" if placement == "with-prefill" else "decode"
        workers = getattr(config, role).workers
        found["pool"] = (ask + probing) * times.extend_shared / workers
        found[role] += (ask + probing) / workers
    elif placement == "coupled":
        found["pool"] = max(ask / config.prefill.workers, probing / config.decode.workers) * times.extend_shared
        found["prefill"] += ask / config.prefill.workers
        found["decode"] += probing / config.decode.workers
    return found


def capacity(setup: Setup, arrivals: Sequence[Arrival]) -> float:
    """Requests/s at which the busiest resource is busy all the time; above it queues grow without end."""
    return 1 / max(demands(setup, arrivals).values())
