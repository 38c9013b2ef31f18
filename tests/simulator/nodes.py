"""Small simulated nodes and arrivals."""

from random import Random

from msgspec.structs import replace

from runtime.node.config import Disaggregate, HandoverSection, HttpSection, NodeConfig
from runtime.node.worker_config import DecodeSection, PoolPlacement, PoolSection, PrefillSection
from runtime.simulator.node import Simulation
from runtime.simulator.policies import PolicyChoice
from runtime.simulator.setup import Setup
from runtime.simulator.times.service import H100_8B
from runtime.simulator.traces import Arrival

BLOCK = 32  # tokens
MS = 1_000_000
EXACT = replace(
    H100_8B, prefill_pass_s=0.0, prefill_token_s=1e-3, prefill_pair_s=0.0, decode_step_s=3e-3, decode_row_s=0.0,
    decode_context_s=0.0, kv_token_bytes=0.0, link_s=0.0,
)  # fmt: skip
"""A token of a prompt takes 1 ms, a step of decode 3 ms, and a hand-over no time."""
POLICIES = ("configured", "fixed:0.3", "paper")


def config(
    *, prefill: int = 1, decode: int = 2, pools: int = 1, slots: int = 8, in_flight: int = 10_000,
    disaggregate: Disaggregate = "always", placement: PoolPlacement = "own",
) -> NodeConfig:  # fmt: skip
    return NodeConfig(
        http=HttpSection(max_in_flight=in_flight),
        prefill=PrefillSection(workers=prefill, slots=4, chunk_tokens=512),
        decode=DecodeSection(workers=decode, slots=slots),
        handover=HandoverSection(disaggregate=disaggregate),
        pool=PoolSection(workers=pools, slots=4, placement=placement),
    )


def setup(policy: str = "configured", *, slot_s: float = 1e-7, seed: int = 0, node: NodeConfig | None = None) -> Setup:
    """Return a simulation setup. `slot_s`: time that a slot adds to an extend; a query takes about 35 extends."""
    times = replace(H100_8B, extend_s=1e-5, extend_slot_s=slot_s)
    return Setup(config=node or config(), times=times, policy=PolicyChoice.parse(policy), seed=seed)


def poisson(count: int, rate: float, *, prompt: int = 300, output: int = 100, seed: int = 1) -> list[Arrival]:
    random, at = Random(seed), 0.0
    arrivals = []
    for _ in range(count):
        arrivals.append(Arrival(at, random.randint(1, 2 * prompt), random.randint(1, 2 * output)))
        at += random.expovariate(rate)
    return arrivals


def arrival(at_s: float, tokens: int, *prefix: int, output: int = 1) -> Arrival:
    """Return a prompt whose first blocks have the hashes `prefix`."""
    return Arrival(at_s, tokens, output, prefix, BLOCK)


def talks(count: int, rate: float, seed: int = 2) -> list[Arrival]:
    """Return turns of conversations, each preceded by all earlier turns."""
    random, at_s, found = Random(seed), 0.0, []
    known: dict[int, list[int]] = {}
    for number in range(count):
        at_s += random.expovariate(rate)
        turn = known.setdefault(random.randrange(8), [])
        turn += [number * 8 + i for i in range(random.randint(1, 6))]
        tokens = len(turn) * BLOCK - random.randrange(BLOCK)
        found.append(arrival(at_s, tokens, *turn, output=random.randint(1, 60)))
        if len(turn) > 40:
            turn.clear()
    return found


def run(made: Setup, *arrivals: Arrival) -> Simulation:
    simulation = Simulation(made, arrivals)
    simulation.run()
    return simulation


def without_retrieval(made: Setup) -> Setup:
    return replace(made, workload=replace(made.workload, retrieval=False))
