"""Prefix reuse in a trace, by the information the router has, and by KV tiers.

    python -m benchmarks.prefixes --trace mooncake-conversation.jsonl.gz [--requests 4000] [--out NAME]
    python -m benchmarks.prefixes --part tiers --trace mooncake-conversation.jsonl.gz

Eight simulated GPUs, with the simulator's default times (an H100's from data sheets), and KV in the memory that the
weights leave; 4 + 4 workers, always disaggregated or conditionally, or 8 that do both. The router uses load alone, the
prefixes that it sent to each worker (as shipped, or with other weights), or the blocks that the workers really have,
which is an upper bound for any reporting by workers. Without KV tiers.

Part "tiers": the effect of host tiers, by their size and copy bandwidth; and of decode-first order.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.common.report import table, write
from runtime.node.config import (
    DecodeSection,
    Disaggregate,
    HandoverSection,
    HttpSection,
    KvSection,
    NodeConfig,
    PrefillSection,
)
from runtime.serving.frontend.router import Worker
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.decode import SimDecode
from runtime.simulator.stages.prefill import SimPrefill
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival, at_rate, load_trace
from runtime.simulator.workload import Slos, Workload

Layout = tuple[int, int, Disaggregate]
LAYOUTS: tuple[Layout, ...] = ((4, 4, "always"), (4, 4, "auto"), (1, 8, "never"))
SLOS = Slos(ttft_s=2.0, tpot_s=0.05)
_TIMES = ServiceTimes()
_KV_BLOCKS = int((0.9 * _TIMES.gpu_bytes - _TIMES.weight_bytes) / _TIMES.kv_token_bytes / 32)


def _node(layout: Layout, weight: float = 1.0, host_mib: int = 0) -> NodeConfig:
    prefill, decode, mode = layout
    return NodeConfig(
        http=HttpSection(max_in_flight=100_000, overlap_weight=weight),
        prefill=PrefillSection(workers=prefill, slots=8, kv_blocks=_KV_BLOCKS),
        decode=DecodeSection(workers=decode, slots=64, devices=("cuda:0",), kv_blocks=_KV_BLOCKS),
        handover=HandoverSection(disaggregate=mode),
        kv=KvSection(host_mib=host_mib),
    )


def run_router(arrivals: Sequence[Arrival], layout: Layout, weight: float, knows: bool) -> Any:
    """Run a simulation; return its results. `knows`: the router sees the workers' blocks."""
    setup = Setup(config=_node(layout, weight), times=_TIMES, workload=Workload(retrieval=False), slos=SLOS)
    simulation = Simulation(setup, arrivals)
    if knows:
        for worker in simulation.router.workers():
            worker.prefixes.seen = _seen(simulation, worker)  # type: ignore[method-assign]
    result = simulation.run()
    return {
        "layout": layout, "weight": weight, "knows": knows, "found": result.use["prefix_hits"],
        "ttft_p50_s": result.ttft_s.p50, "ttft_p90_s": result.ttft_s.p90, "attainment": result.attainment,
        "by_decode": result.use["by_decode"] / len(arrivals),
    }  # fmt: skip


def _seen(simulation: Simulation, worker: Worker) -> Any:
    name = worker.hello.worker
    blocks = (simulation.prefills.get(name) or simulation.decodes[name]).prompts
    assert blocks is not None, "the trace contains prefixes"

    def seen(prefix: Sequence[int], since_ns: int = 0) -> int:
        tokens = len(prefix) * blocks.block_tokens
        return blocks.cached_tokens(Arrival(0.0, tokens + 1, 1, tuple(prefix))) // blocks.block_tokens

    return seen


def shared(arrivals: Sequence[Arrival]) -> float:
    """Return the share of prompt tokens that one worker without evictions would reuse."""
    known: set[int] = set()
    found = 0
    for arrival in arrivals:
        blocks = arrival.prefix[: (arrival.prompt_tokens - 1) // arrival.block_tokens]
        found += sum(block in known for block in blocks) * arrival.block_tokens
        known.update(arrival.prefix)
    return found / sum(arrival.prompt_tokens for arrival in arrivals)


# ---- KV tiers

HOST_MIB = (0, 512, 64 << 10, 512 << 10)
COPIES: tuple[tuple[str, ServiceTimes], ...] = (
    ("2 GB/s, as files on this machine", _TIMES),
    ("40 GB/s, as a GPU's copy to the host might", replace(_TIMES, tier_write_bytes_s=4e10, tier_load_bytes_s=4e10)),
)


def tiers(arrivals: Sequence[Arrival]) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run disaggregated workers, and GPUs that do both."""
    found: list[Any] = []
    for layout in (LAYOUTS[0], LAYOUTS[2]):
        for name, times in COPIES:
            sizes = HOST_MIB[name != COPIES[0][0] :]
            found += [_tiered(arrivals, layout, name, times, host_mib) for host_mib in sizes]
        if layout[2] != "never":
            found.append(_tiered(arrivals, layout, "", _TIMES, 0, first=True))
    rows: list[tuple[Any, ...]] = [
        (
            one["workers"], one["tier"], f"{one['found']:.1%}",
            f"{one['ttft_p50_s'] * 1e3:.0f}, {one['ttft_p90_s'] * 1e3:.0f} ms", f"{one['attainment']:.1%}",
            f"{one['stored']:,}, {one['loaded']:,}",
        )
        for one in found
    ]  # fmt: skip
    return found, rows


def _tiered(
    arrivals: Sequence[Arrival], layout: Layout, copies: str, times: ServiceTimes, host_mib: int, *, first: bool = False
) -> Any:
    """Run a simulation; return its results. `first`: in order "decode first"."""
    config = _node(layout, host_mib=host_mib)
    if first:
        config = replace(config, handover=replace(config.handover, order="decode_first"))
    simulation = Simulation(Setup(config=config, times=times, workload=Workload(retrieval=False), slos=SLOS), arrivals)
    result = simulation.run()
    workers: list[SimPrefill | SimDecode] = [*simulation.prefills.values(), *simulation.decodes.values()]
    kept = [worker.prompts for worker in workers if worker.prompts is not None]
    size = f"{host_mib >> 10} GiB" if host_mib >= 1024 else f"{host_mib} MiB"
    return {
        "workers": f"{layout[1]} that do both" if layout[2] == "never" else f"{layout[0]} + {layout[1]}, {layout[2]}",
        "tier": f"{size}, {copies}" if host_mib else "none, decode first" if first else "none",
        "found": result.use["prefix_hits"], "ttft_p50_s": result.ttft_s.p50, "ttft_p90_s": result.ttft_s.p90,
        "attainment": result.attainment,
        "stored": sum(prompts.tiers.count("stored") for prompts in kept),
        "loaded": sum(prompts.tiers.count("loaded") for prompts in kept),
    }  # fmt: skip


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a trace with prefix hashes: Mooncake's")
    parser.add_argument("--part", choices=("router", "tiers"), default="router")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s")
    parser.add_argument("--weights", type=float, nargs="+", default=[0, 1, 4], help="of the sent prefixes")
    parser.add_argument("--out", type=Path, help="output files, without suffix")
    options = parser.parse_args()
    arrivals = at_rate(load_trace(options.trace, options.requests), options.rate)
    if options.part == "tiers":
        found, rows = tiers(arrivals)
        head = (
            "workers",
            "host tier",
            "tokens reused",
            "TTFT p50, p90",
            "met both limits",
            "blocks written, loaded",
        )
        summary = f"{len(arrivals)} requests of {options.trace.name} at {options.rate:g}/s."
        write({"found": found}, "\n".join([summary, "", *table(head, rows)]), options.out)
        return
    most = shared(arrivals)
    found = [
        run_router(arrivals, layout, weight, knows)
        for layout in LAYOUTS
        for weight, knows in (*((weight, False) for weight in options.weights), (1.0, True))
    ]
    rows = []
    for one in found:
        prefill, decode, mode = one["layout"]
        workers = f"{decode} that do both" if mode == "never" else f"{prefill} + {decode}, {mode}"
        way = "workers' blocks, weight 1" if one["knows"] else f"sent prefixes, weight {one['weight']:g}"
        rows.append(
            (
                workers, "load alone" if not one["weight"] else way, f"{one['found']:.1%}",
                f"{one['ttft_p50_s'] * 1e3:.0f}, {one['ttft_p90_s'] * 1e3:.0f} ms", f"{one['attainment']:.1%}",
                f"{one['by_decode']:.0%}",
            )
        )  # fmt: skip
    head = ("workers", "the router uses", "tokens reused", "TTFT p50, p90", "met both limits", "by decode")
    summary = (
        f"{len(arrivals)} requests of {options.trace.name} at {options.rate:g}/s; one worker without evictions "
        f"would reuse {most:.1%} of the prompts' tokens."
    )
    write({"shared": most, "found": found}, "\n".join([summary, "", *table(head, rows)]), options.out)


if __name__ == "__main__":
    main()
