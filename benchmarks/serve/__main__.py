"""Benchmark prefill and decode under load on this machine, in one run of seven minutes.

    python -m benchmarks.serve                                       # a small random Llama, random arrivals
    python -m benchmarks.serve --data DIR          # arrivals and lengths as in a real trace, scaled
    python -m benchmarks.serve --model smollm2 --only ttft,handover  # a real model: ten times slower

Uses two cores: prefill on the first, decode on the last; the colocated workers one on each. Compared systems run
alternately within the same run. Missed bars are printed as missed; the exit code is 0 in any case.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.serve.bench import Bench
from benchmarks.serve.report import Section, about, markdown, write
from benchmarks.serve.sections import (
    goodput,
    handover,
    probes,
    tpot,
    ttft,
)

SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "tpot": tpot.run,
    "handover": handover.run,
    "ttft": ttft.run,
    "probes": probes.run,
    "goodput": goodput.run,
}


def main() -> None:
    """Run the chosen sections and write their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"comma-separated sections: {', '.join(SECTIONS)}")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--data", type=Path, help="a trace, or a directory with azure-2023-conv.csv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all times and counts: 0.2 for a quick run")
    parser.add_argument(
        "--out", type=Path, help="path prefix, such as benchmarks/results/serve, for .md, .json and .png"
    )
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name] or list(SECTIONS)
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        parser.error(f"--only: unknown section {unknown[0]!r}; available: {', '.join(SECTIONS)}")
    sections = []
    with tempfile.TemporaryDirectory() as folder, Bench(options, Path(folder)) as bench:
        known = about(
            model=bench.info.name,
            seed=options.seed,
            scale=options.scale,
            data=options.data.name if options.data else "drawn",
        )
        known["load before"] = f"{os.getloadavg()[0]:.1f}"
        for name in chosen:
            begin = time.monotonic()
            section = SECTIONS[name](bench)
            section.seconds = time.monotonic() - begin
            sections.append(section)
            print(f"{name}: {section.seconds:.0f} s", file=sys.stderr, flush=True)
    print(markdown(sections, known))
    if options.out:
        write(sections, known, options.out)


if __name__ == "__main__":
    main()
