"""Eight simulated GPUs that prefill and decode, requests for them, and how many they serve within their SLOs."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from msgspec.structs import replace

from runtime.node.config import DecodeSection, Disaggregate, HandoverSection, HttpSection, NodeConfig, PrefillSection
from runtime.simulator.setup import Setup
from runtime.simulator.traces import Arrival, load_trace
from runtime.simulator.workload import Slos, Workload

GPUS, SHARE = 8, 0.9
Lengths = list[tuple[int, int]]  # of prompts and answers


def node(prefill: int, mode: Disaggregate, slos: Slos, planner: str = "off") -> Setup:
    """GPUs of prefill, the rest of decode. "never": all decode, and one more worker that would retrieve."""
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
    """Log-normal, with these means."""
    random = Random(1)

    def draw(mean: int) -> int:
        return max(2, int(mean * random.lognormvariate(-(spread**2) / 2, spread)))

    return [(draw(prompt), draw(output)) for _ in range(count)]


def trace_lengths(path: Path, count: int = 5000) -> Lengths:
    """Those of a trace, in its order."""
    return [(arrival.prompt_tokens, arrival.output_tokens) for arrival in load_trace(path, count)]


def arrivals(found: Lengths, rate: float, seconds: float) -> list[Arrival]:
    """Requests of these lengths at so many a second, by Poisson."""
    random, at_s, sent = Random(2), 0.0, list[Arrival]()
    while at_s < seconds:
        sent.append(Arrival(at_s, *found[len(sent) % len(found)]))
        at_s += random.expovariate(rate)
    return sent


def greatest(good: Callable[[float], bool], most: float, rounds: int = 5, least: float = 0.0) -> float:
    """The greatest value below `most` that is good, by bisection; `least` if none is."""
    low, high = least, most
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
