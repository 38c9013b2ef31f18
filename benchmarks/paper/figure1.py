"""Figure 1: throughput of search, prefill and decode by batch size, on one scale, with operating points."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.common.report import plot, table
from benchmarks.paper.pool import Result
from gpu.roofline import Saturation
from runtime.simulator.times.service import ServiceTimes

_SIZES = tuple(2**power for power in range(13))
_CONTEXT = 1000  # tokens of a decode row


def figure1(options: Namespace) -> Result:
    """Throughput relative to the maximum, by batch size.

    Search: slots per extend; prefill: tokens per pass; decode: rows per step, with 1,000 tokens each. The operating
    point is X_sat of u(X) = min(u_max, (X / X_sat)^α), fitted to the points. Times come from `--times` (written by
    `trinity calibrate`), else from data sheets.
    """
    times = ServiceTimes.load(options.times) if options.times else ServiceTimes()
    seconds = {
        "search (slots)": [times.round_s + times.extend_time_s(x) for x in _SIZES],
        "prefill (tokens)": [times.prefill_pass_s + times.prefill_s(0, x) for x in _SIZES],
        "decode (rows)": [times.decode_s(x, x * _CONTEXT) for x in _SIZES],
    }
    results: dict[str, Any] = {}
    for name, taken in seconds.items():
        rates = [x / took for x, took in zip(_SIZES, taken, strict=True)]
        shares = [rate / max(rates) for rate in rates]
        curve = Saturation.fit(_SIZES, shares)
        results[name] = {"shares": shares, "most_a_second": max(rates), "x_sat": curve.x_sat, "alpha": curve.alpha}
        results[name]["seconds"] = taken[min(range(len(_SIZES)), key=lambda i: abs(_SIZES[i] - curve.x_sat))]
    rows = [
        (
            name,
            f"{one['most_a_second']:,.0f}",
            f"{one['x_sat']:.0f}",
            f"{one['alpha']:.2f}",
            f"{one['seconds'] * 1e3:.2f}",
        )
        for name, one in results.items()
    ]

    def draw(path: Path) -> None:
        with plot(path, 1, width=6, height=4) as (axes,):
            for number, (name, one) in enumerate(results.items()):
                axes.plot(_SIZES, one["shares"], f"C{number}-", label=name)
                at = min(one["x_sat"], _SIZES[-1])
                axes.axvline(at, color=f"C{number}", ls=":", lw=1)
                axes.plot([at], [1.0], f"C{number}v")
            axes.set_xscale("log", base=2)
            axes.set_xlabel("batch")
            axes.set_ylabel("throughput / maximum")
            axes.legend()

    return results, table(("stage", "maximum per second", "X_sat", "α", "ms per batch there"), rows), draw
