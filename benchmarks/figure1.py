"""Figure 1 of arXiv 2512.02281: throughput of search, prefill and decode by batch size, with operating points.

    python -m benchmarks.figure1 [--times FILE] [--out DIR]

Throughput is relative to the maximum. Search: slots per extend; prefill: tokens per pass; decode: rows per step, with
1,000 tokens each. The operating point is X_sat of u(X) = min(u_max, (X / X_sat)^α), fitted to the points. Times come
from `--times` (written by `trinity calibrate`), else from data sheets.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common.report import plot, table, write
from gpu.roofline import Saturation
from runtime.simulator.times.service import ServiceTimes

_SIZES = tuple(2**power for power in range(13))
_CONTEXT = 1000  # tokens of a decode row


def main() -> None:
    """Write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, help="service times from `trinity calibrate`")
    parser.add_argument("--out", type=Path, help="folder for paper-figure1.json, .md and .png")
    options = parser.parse_args()
    results = throughput(ServiceTimes.load(options.times) if options.times else ServiceTimes())
    text = [
        "# Figure 1",
        "",
        "`python -m benchmarks.figure1`: throughput relative to the maximum, by batch size.",
        "",
        *rows(results),
    ]
    write(results, "\n".join(text), options.out and options.out / "paper-figure1")
    if options.out:
        draw(results, options.out / "paper-figure1.png")


def throughput(times: ServiceTimes) -> dict[str, Any]:
    """Return each stage's throughput by batch size, and its operating point."""
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
    return results


def rows(results: dict[str, Any]) -> list[str]:
    """Return the table's lines."""
    cells = [
        (
            name,
            f"{one['most_a_second']:,.0f}",
            f"{one['x_sat']:.0f}",
            f"{one['alpha']:.2f}",
            f"{one['seconds'] * 1e3:.2f}",
        )
        for name, one in results.items()
    ]
    return list(table(("stage", "maximum per second", "X_sat", "α", "ms per batch there"), cells))


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot all stages."""
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


if __name__ == "__main__":
    main()
