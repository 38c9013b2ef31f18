"""Goodput of a simulated node of eight GPUs that has prefill and decode apart, never, or chooses for each prompt.

    python -m benchmarks.disaggregation [--requests 3000]

Service times are the simulator's defaults: an H100's from data sheets. Limits: first token .5 s, each later one 25 ms.
Goodput is the greatest rate tried at which 90% of the sent requests meet both.
"""

import argparse
from random import Random

from runtime.node.config import DecodeSection, Disaggregate, HandoverSection, HttpSection, NodeConfig, PrefillSection
from runtime.simulator.node import simulate
from runtime.simulator.setup import Setup
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Slos, Workload

_ATTAINMENT = 0.9
_SLOTS = 128
_RATES = (20, 30, 40, 50, 60, 70, 80, 90, 100, 120, 140, 160, 180, 200, 220, 240, 260, 280, 300)
_NODES: tuple[tuple[int, int, Disaggregate], ...] = (
    (4, 4, "always"), (2, 6, "always"), (4, 4, "auto"), (2, 6, "auto"), (1, 7, "auto"), (1, 8, "never"),
)  # fmt: skip


def arrivals(rate: float, count: int, documents: float) -> list[Arrival]:
    """Chats of 500 and 200 tokens in the mean; a share of them with a document of 8,000."""
    random, at_s, found = Random(1), 0.0, []
    for _ in range(count):
        prompt = 8000 if random.random() < documents else max(8, int(500 * random.lognormvariate(-0.32, 0.8)))
        found.append(Arrival(at_s, prompt, max(2, int(200 * random.lognormvariate(-0.32, 0.8)))))
        at_s += random.expovariate(rate)
    return found


def goodput(prefill: int, decode: int, mode: Disaggregate, count: int, documents: float) -> tuple[int, float, float]:
    """The greatest rate of those tried; at it the P99 of TPOT in ms, and the share of prompts that decode computes."""
    config = NodeConfig(
        http=HttpSection(max_in_flight=100_000),
        prefill=PrefillSection(workers=prefill, slots=8),
        decode=DecodeSection(workers=decode, slots=_SLOTS, devices=("cuda:0",)),
        handover=HandoverSection(disaggregate=mode),
    )
    setup = Setup(config=config, workload=Workload(retrieval=False), slos=Slos(ttft_s=0.5, tpot_s=0.025))
    best = (0, 0.0, 0.0)
    for rate in _RATES:
        result = simulate(setup, arrivals(rate, count, documents))
        if result.attainment < _ATTAINMENT:
            break
        best = rate, result.tpot_s.p99 * 1e3, result.use["by_decode"] / count
    return best


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    print("| GPUs | short chats | a tenth with 8,000 tokens |\n|---|---|---|")
    for prefill, decode, mode in _NODES:
        name = f"{decode}, colocated" if mode == "never" else f"{prefill} prefill, {decode} decode, {mode}"
        cells = [goodput(prefill, decode, mode, options.requests, documents) for documents in (0.0, 0.1)]
        told = [f"{rate}/s, TPOT p99 {tpot:.0f} ms, {share:.0%} by decode" for rate, tpot, share in cells]
        print(f"| {name} | {told[0]} | {told[1]} |", flush=True)


if __name__ == "__main__":
    main()
