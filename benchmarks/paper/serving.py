"""A simulated node of eight GPUs without retrieval, workloads for it, and a search for its capacity."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from msgspec.structs import replace

from runtime.node.config import DecodeSection, Disaggregate, HandoverSection, HttpSection, NodeConfig, PrefillSection
from runtime.simulator.setup import Setup
from runtime.simulator.traces import Arrival, load_trace
from runtime.simulator.workload import Slos, Workload

GPUS, SHARE = 8, 0.9
Lengths = list[tuple[int, int]]  # (prompt, output) tokens


def node(prefill: int, mode: Disaggregate, slos: Slos, planner: str = "off") -> Setup:
    """Return a node with this many prefill GPUs, the rest decode. "never": all decode, plus one retrieval worker."""
    config = NodeConfig(
        http=HttpSection(max_in_flight=100_000),
        prefill=PrefillSection(workers=prefill, slots=16),
        decode=DecodeSection(workers=GPUS - prefill * (mode != "never"), slots=256, devices=("cuda:0",)),
        handover=HandoverSection(disaggregate=mode),
    )
    control = replace(config.control, planner=planner)
    config = replace(config, control=control, slo=replace(config.slo, objective=SHARE))
    return Setup(config=config, workload=Workload(retrieval=False), slos=slos)


def lengths(prompt: int, output: int, spread: float, count: int = 5000) -> Lengths:
    """Return log-normal lengths with these means."""
    random = Random(1)

    def draw(mean: int) -> int:
        return max(2, int(mean * random.lognormvariate(-(spread**2) / 2, spread)))

    return [(draw(prompt), draw(output)) for _ in range(count)]


def trace_lengths(path: Path, count: int = 5000) -> Lengths:
    """Return the lengths of a trace, in its order."""
    return [(arrival.prompt_tokens, arrival.output_tokens) for arrival in load_trace(path, count)]


def arrivals(found: Lengths, rate: float, seconds: float) -> list[Arrival]:
    """Return Poisson arrivals of these lengths."""
    random, at_s, sent = Random(2), 0.0, list[Arrival]()
    while at_s < seconds:
        sent.append(Arrival(at_s, *found[len(sent) % len(found)]))
        at_s += random.expovariate(rate)
    return sent


def greatest(good: Callable[[float], bool], most: float, rounds: int = 5, least: float = 0.0) -> float:
    """Return the highest value below `most` that is good, by bisection; `least` if none is."""
    low, high = least, most
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
