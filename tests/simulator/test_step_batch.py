"""Tests of step batches: one event for many steps gives the same result as single steps."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.simulator.node import Simulation
from runtime.simulator.traces import Arrival
from tests.simulator.nodes import config, setup


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([2.0, 8.0, 40.0]),
    every=st.sampled_from([0, 5, 32]),
    device=st.sampled_from(["cpu", "cuda:0"]),
)
def test_a_node_run_is_equal_to_the_nanosecond_for_any_number_of_steps_per_event(
    seed: int, rate: float, every: int, device: str
) -> None:
    """With free contexts, so that a step's time is constant while rows stay, and without block accounting, which
    allocates for as many steps as one event has."""
    random, at_s, arrivals = Random(seed), 0.0, []
    for _ in range(40):
        at_s += random.expovariate(rate)
        arrivals.append(Arrival(at_s, random.randint(1, 400), random.randint(1, 120)))
    node = config()
    node = replace(node, decode=replace(node.decode, devices=(device,)))
    made = setup(slot_s=1e-5, node=node, seed=seed)
    made = replace(
        made,
        times=replace(made.times, decode_context_s=0.0),
        workload=replace(made.workload, probe_every_tokens=every, probe_hit=0.5),
    )
    found = []
    for most_steps in (64, 1):
        simulation = Simulation(made, arrivals, most_steps)
        simulation.run()
        found.append([(r.first_token_ns, r.end_ns, r.stalled_ns, r.outcome) for r in simulation.requests])
    assert found[0] == found[1]
