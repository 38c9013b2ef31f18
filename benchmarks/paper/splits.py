"""Experiments with prefill and decode: the split of GPUs, and the chunk size."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.common.report import plot, table
from benchmarks.paper.pool import Result
from benchmarks.paper.serving import GPUS, SHARE, arrivals, greatest, lengths, node
from runtime.node.config import Disaggregate
from runtime.simulator.node import simulate
from runtime.simulator.workload import Slos

_SLOS = Slos(ttft_s=0.5, tpot_s=0.015)
_NODES: tuple[tuple[str, int, Disaggregate], ...] = (
    ("2 + 6 apart", 2, "always"), ("3 + 5 apart", 3, "always"), ("4 + 4 apart", 4, "always"),
    ("3 + 5, auto", 3, "auto"), (f"{GPUS} colocated", 1, "never"),
)  # fmt: skip
_RATES = tuple(range(10, 121, 10))
_CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)


def splits(options: Namespace) -> Result:
    """Goodput curves as in DistServe: the share of requests that meet TTFT .5 s and TPOT 15 ms, by rate.

    Prompts have 1,200 tokens on average, answers 210 (as Azure's conversations).
    """
    found = lengths(1200, 210, 0.7)
    results: dict[str, list[float]] = {}
    for name, prefill, mode in _NODES:
        setup = node(prefill, mode, _SLOS)
        results[name] = [simulate(setup, arrivals(found, rate, 30.0)).attainment for rate in _RATES]
    best = {
        name: max((r for r, s in zip(_RATES, shares, strict=True) if s >= SHARE), default=0)
        for name, shares in results.items()
    }
    rows = [(name, *(f"{share:.2f}" for share in shares), f"{best[name]}/s") for name, shares in results.items()]
    head = ("GPUs", *(f"{rate}/s" for rate in _RATES), "at 90%")

    def draw(path: Path) -> None:
        with plot(path, 1, width=6) as (axes,):
            for name, shares in results.items():
                axes.plot(_RATES, shares, "o-", ms=3, label=name)
            axes.axhline(SHARE, color="0.7", lw=1)
            axes.set_xlabel("requests/s on eight GPUs")
            axes.set_ylabel("met TTFT and TPOT")
            axes.legend(fontsize=8)

    return results, table(head, rows), draw


def chunks(options: Namespace) -> Result:
    """Chunked prefill on colocated workers: effect of the chunk size on both SLOs.

    The rate at which 90% of requests meet TTFT 1 s and TPOT 25 ms, and both latencies at 60 requests/s. Lengths as in
    `splits`.
    """
    found = lengths(1200, 210, 0.7)
    setup = node(1, "never", Slos(ttft_s=1.0, tpot_s=0.025))
    results: list[dict[str, Any]] = []
    for chunk in _CHUNKS:
        config = replace(setup.config, decode=replace(setup.config.decode, chunk_tokens=chunk))
        sized = replace(setup, config=config)
        result = simulate(sized, arrivals(found, 60.0, 30.0))

        def good(rate: float, sized: Any = sized) -> bool:
            return simulate(sized, arrivals(found, rate, 20.0)).attainment >= SHARE

        results.append(
            {"chunk": chunk, "ttft_s": result.ttft_s.p90, "tpot_s": result.tpot_s.p90, "rate": greatest(good, 160.0)}
        )
    rows = [
        (one["chunk"], f"{one['ttft_s'] * 1e3:.0f} ms", f"{one['tpot_s'] * 1e3:.1f} ms", f"{one['rate']:.0f}/s")
        for one in results
    ]

    def draw(path: Path) -> None:
        with plot(path, 3) as panels:
            for axes, key, title in zip(
                panels, ("ttft_s", "tpot_s", "rate"), ("TTFT p90, s", "TPOT p90, s", "requests/s at 90%"), strict=True
            ):
                axes.plot(_CHUNKS, [one[key] for one in results], "o-")
                axes.set_xscale("log", base=2)
                axes.set_xlabel("tokens per chunk")
                axes.set_title(title)

    return results, table(("tokens per chunk", "TTFT p90 at 60/s", "TPOT p90", "goodput"), rows), draw
