"""Experiments with prefill and decode: how many GPUs each has, and how large a chunk is."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.common.report import plot, table
from benchmarks.paper.pool import Found
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


def splits(options: Namespace) -> Found:
    """Goodput curves, as DistServe draws them: the share of requests that meet TTFT .5 s and TPOT 15 ms, by rate.
    Prompts have 1,200 tokens in the mean, answers 210 (as Azure's conversations)."""
    found = lengths(1200, 210, 0.7)
    figures: dict[str, list[float]] = {}
    for name, prefill, mode in _NODES:
        setup = node(prefill, mode, _SLOS)
        figures[name] = [simulate(setup, arrivals(found, rate, 30.0)).attainment for rate in _RATES]
    best = {
        name: max((r for r, s in zip(_RATES, shares, strict=True) if s >= SHARE), default=0)
        for name, shares in figures.items()
    }
    rows = [(name, *(f"{share:.2f}" for share in shares), f"{best[name]}/s") for name, shares in figures.items()]
    head = ("GPUs", *(f"{rate}/s" for rate in _RATES), "at 90%")

    def draw(path: Path) -> None:
        with plot(path, 1, width=6) as (axes,):
            for name, shares in figures.items():
                axes.plot(_RATES, shares, "o-", ms=3, label=name)
            axes.axhline(SHARE, color="0.7", lw=1)
            axes.set_xlabel("requests/s on eight GPUs")
            axes.set_ylabel("met TTFT and TPOT")
            axes.legend(fontsize=8)

    return figures, table(head, rows), draw


def chunks(options: Namespace) -> Found:
    """Chunked prefill on colocated workers: what a chunk's size does to both SLOs. Requests/s at which 90% keep TTFT
    1 s and TPOT 25 ms, and both times at 60 requests/s. Prompts as for the splits."""
    found = lengths(1200, 210, 0.7)
    setup = node(1, "never", Slos(ttft_s=1.0, tpot_s=0.025))
    figures: list[dict[str, Any]] = []
    for chunk in _CHUNKS:
        config = replace(setup.config, decode=replace(setup.config.decode, chunk_tokens=chunk))
        sized = replace(setup, config=config)
        result = simulate(sized, arrivals(found, 60.0, 30.0))

        def good(rate: float, sized: Any = sized) -> bool:
            return simulate(sized, arrivals(found, rate, 20.0)).attainment >= SHARE

        figures.append(
            {"chunk": chunk, "ttft_s": result.ttft_s.p90, "tpot_s": result.tpot_s.p90, "rate": greatest(good, 160.0)}
        )
    rows = [
        (one["chunk"], f"{one['ttft_s'] * 1e3:.0f} ms", f"{one['tpot_s'] * 1e3:.1f} ms", f"{one['rate']:.0f}/s")
        for one in figures
    ]

    def draw(path: Path) -> None:
        with plot(path, 3) as panels:
            for axes, key, title in zip(
                panels, ("ttft_s", "tpot_s", "rate"), ("TTFT p90, s", "TPOT p90, s", "requests/s at 90%"), strict=True
            ):
                axes.plot(_CHUNKS, [one[key] for one in figures], "o-")
                axes.set_xscale("log", base=2)
                axes.set_xlabel("tokens of a chunk")
                axes.set_title(title)

    return figures, table(("tokens of a chunk", "TTFT p90 at 60/s", "TPOT p90", "goodput"), rows), draw
