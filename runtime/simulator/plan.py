"""Search for the best split of a node's GPUs for a trace: x prefill, y decode, z pool, and the pool's placement.

Every split is ranked by the utilisation law, which is cheap; the best few of each placement are simulated.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from runtime.errors import ConfigError
from runtime.node.placement.pool_placement import PAIRED_ROLES
from runtime.node.worker_config import PoolPlacement
from runtime.simulator.capacity import capacity, demands
from runtime.simulator.node import simulate
from runtime.simulator.setup import Setup
from runtime.simulator.traces import Arrival, at_rate

PLACEMENTS = tuple(PAIRED_ROLES)
_MEMORY_SHARE = 0.9  # share of GPU memory to plan for; the rest is for activations and the like
_SHARE = 0.9  # of the sent requests, which must meet both SLOs
_TRIED = 3  # splits simulated per placement
_ROUNDS = 6  # bisection steps: finds the highest rate to within 2% of the capacity


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A split and its performance. `rate` is the highest at which `_SHARE` of the sent requests met both SLOs."""

    placement: PoolPlacement
    prefill: int
    decode: int
    pool: int
    decode_slots: int
    capacity: float
    busiest: str
    rate: float


def plans(
    setup: Setup,
    arrivals: Sequence[Arrival],
    gpus: int,
    tried: int = _TRIED,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Plan]:
    """Return the best splits of `gpus` GPUs over all placements, in order. Raises `ConfigError` if there is none."""
    tensor = setup.collectives.tensor
    if gpus < 2 * tensor:
        raise ConfigError(f"{gpus} GPUs: a prefill and a decode worker of {tensor} GPUs each need {2 * tensor}")
    ranked = []
    for placement in PLACEMENTS:
        splits = sorted(_splits(setup, arrivals, placement, gpus), key=lambda split: -capacity(split, arrivals))
        for split in splits[:tried]:
            config = split.config
            progress(f"{placement}: {config.prefill.workers} prefill, {config.decode.workers} decode")
            needs = demands(split, arrivals)
            ranked.append(
                Plan(
                    placement=placement,
                    prefill=config.prefill.workers,
                    decode=config.decode.workers,
                    pool=config.pool.workers,
                    decode_slots=config.decode.slots,
                    capacity=1 / max(needs.values()),
                    busiest=max(needs, key=lambda name: needs[name]),
                    rate=_greatest_rate(split, arrivals),
                )
            )
    if not ranked:
        raise ConfigError(f"{gpus} GPUs: no split has a prefill and a decode GPU with memory for the index and the KV")
    return sorted(ranked, key=lambda plan: -plan.rate)


def _greatest_rate(setup: Setup, arrivals: Sequence[Arrival]) -> float:
    """Return the highest rate at which `_SHARE` of the requests meet both SLOs, by bisection below 1.2 × capacity."""
    low, high = 0.0, 1.2 * capacity(setup, arrivals)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        good = simulate(setup, at_rate(list(arrivals), middle)).attainment >= _SHARE
        low, high = (middle, high) if good else (low, middle)
    return low


def _splits(setup: Setup, arrivals: Sequence[Arrival], placement: PoolPlacement, gpus: int) -> Iterator[Setup]:
    config, tensor = setup.config, setup.collectives.tensor
    slots = fitting_slots(setup, arrivals, with_index="decode" in PAIRED_ROLES[placement])
    if not slots:
        return
    for pool in range(1, gpus - 1) if "own" in placement else (0,):
        workers = (gpus - pool) // tensor  # of prefill and decode
        for prefill in range(1, workers):
            split = replace(
                config,
                prefill=replace(config.prefill, workers=prefill),
                decode=replace(config.decode, workers=workers - prefill, slots=slots),
                pool=replace(config.pool, workers=pool, placement=placement),
                control=replace(config.control, planner="off"),
            )
            yield replace(setup, config=split).with_collectives(gpus)


def fitting_slots(setup: Setup, arrivals: Sequence[Arrival], with_index: bool) -> int:
    """Return how many of the configured decode slots fit into a worker's GPU memory with the weights and, if set, the
    index."""
    times = setup.times
    memory = setup.collectives.tensor * times.gpu_bytes * _MEMORY_SHARE
    free = memory - times.weight_bytes - (times.index_bytes if with_index else 0)
    context = sum(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals) / len(arrivals)
    fits = free / max(times.kv_token_bytes * context, 1)
    return max(0, min(setup.config.decode.slots, int(fits)))
