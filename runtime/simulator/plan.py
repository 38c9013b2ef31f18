"""Which split of a node's GPUs serves a trace best: x prefill, y decode, z pool; and where the index should lie.

Every split is first rated by the utilisation law, which costs nothing; the best few of each placement are simulated.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from runtime.errors import ConfigError
from runtime.node.config import PoolPlacement
from runtime.simulator.capacity import capacity, demands
from runtime.simulator.node import simulate
from runtime.simulator.setup import Setup
from runtime.simulator.traces import Arrival, at_rate

PLACEMENTS: tuple[PoolPlacement, ...] = ("own", "with-prefill", "with-decode", "coupled")
_MEMORY_IN_USE = 0.9  # of a GPU's memory may be planned; activations and the like have the rest
_TRIED = 3  # splits of each placement that are simulated
_ROUNDS = 6  # of bisection: the greatest rate is found to within 2% of the capacity


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A split and what it can do. `rate` is the greatest at which `share` of the sent requests met both SLOs."""

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
    share: float = 0.9,
    tried: int = _TRIED,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Plan]:
    """Splits of `gpus` GPUs of every placement, the best first. Raises `ConfigError` if none can be."""
    found = []
    for placement in PLACEMENTS:
        splits = sorted(_splits(setup, arrivals, placement, gpus), key=lambda split: -capacity(split, arrivals))
        for split in splits[:tried]:
            config = split.config
            progress(f"{placement}: {config.prefill.workers} prefill, {config.decode.workers} decode")
            needs = demands(split, arrivals)
            found.append(
                Plan(
                    placement=placement,
                    prefill=config.prefill.workers,
                    decode=config.decode.workers,
                    pool=config.pool.workers,
                    decode_slots=config.decode.slots,
                    capacity=1 / max(needs.values()),
                    busiest=max(needs, key=lambda name: needs[name]),
                    rate=greatest_rate(split, arrivals, share),
                )
            )
    if not found:
        raise ConfigError(f"{gpus} GPUs: no split has a prefill and a decode GPU with memory for the index and the KV")
    return sorted(found, key=lambda plan: -plan.rate)


def greatest_rate(setup: Setup, arrivals: Sequence[Arrival], share: float, nodes: int = 1) -> float:
    """The greatest rate at which `share` of the sent requests meet both SLOs, by bisection below 1.2 × the capacity.

    nodes: that are alike, know nothing of each other, and get the requests in turn.
    """
    low, high = 0.0, 1.2 * nodes * capacity(setup, arrivals)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        sent = at_rate(list(arrivals), middle)
        results = [simulate(setup, sent[node::nodes]) for node in range(nodes)]
        good = sum(result.attainment * result.sent for result in results) >= share * len(sent)
        low, high = (middle, high) if good else (low, middle)
    return low


def _splits(setup: Setup, arrivals: Sequence[Arrival], placement: PoolPlacement, gpus: int) -> Iterator[Setup]:
    config = setup.config
    slots = fitting_slots(setup, arrivals, index_there=placement in ("with-decode", "coupled"))
    if not slots:
        return
    for pool in range(1, gpus - 1) if placement == "own" else (0,):
        for prefill in range(1, gpus - pool):
            split = replace(
                config,
                prefill=replace(config.prefill, workers=prefill),
                decode=replace(config.decode, workers=gpus - pool - prefill, slots=slots),
                pool=replace(config.pool, workers=pool, placement=placement),
            )
            yield replace(setup, config=split)


def fitting_slots(setup: Setup, arrivals: Sequence[Arrival], index_there: bool) -> int:
    """Decode slots, at most as configured, whose KV fits beside the weights, and the index if it lies there too."""
    times = setup.times
    free = times.gpu_bytes * _MEMORY_IN_USE - times.weight_bytes - (times.index_bytes if index_there else 0)
    context = sum(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals) / len(arrivals)
    fits = free / max(times.kv_token_bytes * context, 1)
    return max(0, min(setup.config.decode.slots, int(fits)))
