"""Goodput of simulated nodes with disaggregated, colocated, or conditionally disaggregated prefill and decode.

    python -m benchmarks.disaggregation [--requests 3000] [--curves serve-curves.json] [--out NAME]

Eight GPUs with the simulator's default times (an H100's, from data sheets); workloads: chats, and chats of which a
tenth contain a document. Limits: TTFT .5 s, TPOT 25 ms. With --curves, the output of `benchmarks.serve --only curves
--out`, also two workers with the times measured there, and limits of 6 and 3 times those of a request alone; the TTFT
limit of a document is based on a document. Goodput is the highest tested rate at which 90% of the sent requests meet
their limits.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.common.report import table, write
from runtime.node.config import DecodeSection, Disaggregate, HandoverSection, HttpSection, NodeConfig, PrefillSection
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Slos, Workload

_ATTAINMENT = 0.9
_DOCUMENTS = 0.1
Split = tuple[int, int, Disaggregate]


class Machine(NamedTuple):
    """A simulated machine and its workload: service times, splits of the workers, mean tokens of a prompt and an answer
    and tokens of a document, slots of decode and prefill, and the request rates to test."""

    name: str
    times: ServiceTimes
    splits: Sequence[Split]
    lengths: tuple[int, int, int]
    slots: tuple[int, int]
    rates: Sequence[int]

    def setup(self, split: Split, slos: Slos) -> Setup:
        prefill, decode, mode = split
        config = NodeConfig(
            http=HttpSection(max_in_flight=100_000),
            prefill=PrefillSection(workers=prefill, slots=self.slots[1]),
            decode=DecodeSection(workers=decode, slots=self.slots[0], devices=("cuda:0",)),
            handover=HandoverSection(disaggregate=mode),
        )
        return Setup(config=config, times=self.times, workload=Workload(retrieval=False), slos=slos)

    def arrivals(self, rate: float, count: int, documents: float) -> list[Arrival]:
        """Return arrivals of chats, of which a share contain a document."""
        random, at_s, found = Random(1), 0.0, []
        prompt, answer, document = self.lengths
        for _ in range(count):
            tokens = document if random.random() < documents else _draw_length(random, prompt, 8, document // 2)
            found.append(Arrival(at_s, tokens, _draw_length(random, answer, 2, 10 * answer)))
            at_s += random.expovariate(rate)
        return found

    def alone(self, tokens: int) -> tuple[float, float]:
        """Return TTFT and TPOT of a single request, disaggregated."""
        simulation = Simulation(self.setup((1, 1, "always"), Slos()), [Arrival(0.0, tokens, self.lengths[1])])
        simulation.run()
        (one,) = simulation.requests
        return one.ttft_s, one.tpot_s


def _draw_length(random: Random, mean: int, least: int, most: int) -> int:
    return min(most, max(least, int(mean * random.lognormvariate(-0.32, 0.8))))


EIGHT = Machine(
    "8 GPUs",
    ServiceTimes(),
    (
        (4, 4, "always"), (2, 6, "always"), (4, 4, "auto"), (2, 6, "auto"), (1, 7, "auto"), (1, 8, "never"),
    ),
    (500, 200, 8000),
    (128, 8),
    (20, 30, 40, 50, 60, 70, 80, 90, 100, 120, 140, 160, 180, 200, 220, 240, 260, 280, 300, 320),
)  # fmt: skip


def goodput(
    machine: Machine, split: Split, limits: tuple[float, float, float], count: int, documents: float
) -> tuple[int, float, float]:
    """Return the highest rate that meets the goal, and its P99 TPOT in ms and share of prompts computed by decode."""
    ttft_s, tpot_s, document_s = limits
    best = (0, 0.0, 0.0)
    for rate in machine.rates:
        simulation = Simulation(
            machine.setup(split, Slos(ttft_s=ttft_s, tpot_s=tpot_s)), machine.arrivals(rate, count, documents)
        )
        result = simulation.run()
        met = sum(
            one.met(document_s if one.arrival.prompt_tokens == machine.lengths[2] else ttft_s, tpot_s)
            for one in simulation.requests
        )
        if met < _ATTAINMENT * count:
            break
        best = rate, result.tpot_s.p99 * 1e3, result.use["by_decode"] / count
    return best


def measured(path: Path) -> Machine:
    """Return two workers with the service times fitted in a measured run."""
    (found,) = [s for s in json.loads(path.read_text())["sections"] if s["name"] == "curves"]
    return Machine(
        "2 cores",
        ServiceTimes(**found["details"]["times"]),
        ((1, 1, "always"), (1, 1, "auto"), (1, 2, "never")),
        (160, 24, 1536),
        (16, 8),
        range(4, 200, 4),
    )


def run(machine: Machine, limits: tuple[float, float, float], count: int) -> list[dict[str, Any]]:
    """Measure every split, without and with documents."""
    found = []
    for split in machine.splits:
        one: dict[str, Any] = {"machine": machine.name, "split": split}
        for name, documents in (("chats", 0.0), ("documents", _DOCUMENTS)):
            one[name] = goodput(machine, split, limits, count, documents)
        found.append(one)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--curves", type=Path, help="output of benchmarks.serve --only curves --out (.json)")
    parser.add_argument("--out", type=Path, help="output path without extension")
    options = parser.parse_args()
    found = run(EIGHT, (0.5, 0.025, 0.5), options.requests)
    if options.curves:
        two = measured(options.curves)
        (ttft_s, tpot_s), (document_s, _) = two.alone(two.lengths[0]), two.alone(two.lengths[2])
        found += run(two, (6 * ttft_s, 3 * tpot_s, 6 * document_s), options.requests)
    rows = []
    for one in found:
        prefill, decode, mode = one["split"]
        name = f"{decode} colocated" if mode == "never" else f"{prefill} prefill, {decode} decode, {mode}"
        cells = [
            f"{rate}/s, TPOT p99 {tpot:.1f} ms, {share:.0%} by decode"
            for rate, tpot, share in (one["chats"], one["documents"])
        ]
        rows.append((f"{one['machine']}: {name}", *cells))
    lines = table(("workers", "chats", "a tenth with documents"), rows)
    write(found, "\n".join([f"{options.requests} simulated requests a rate.", "", *lines]), options.out)


if __name__ == "__main__":
    main()
