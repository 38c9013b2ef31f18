"""`python -m benchmarks.paper NAME [--out DIR]`: runs an experiment; writes its table and plot.

All experiments are simulated, by default on eight GPUs with service times from data sheets.
"""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.report import write
from benchmarks.paper.figure1 import figure1
from benchmarks.paper.pool import Result, batching

EXPERIMENTS: dict[str, Callable[[argparse.Namespace], Result]] = {run.__name__: run for run in (figure1, batching)}


def main() -> None:
    """Run one experiment."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--times", type=Path, help="service times from `trinity calibrate`, for figure1")
    parser.add_argument("--out", type=Path, help="output directory for paper-NAME.json, .md and .png")
    options = parser.parse_args()
    run = EXPERIMENTS[options.name]
    results, lines, draw = run(options)
    text = [f"# {options.name}", "", f"`python -m benchmarks.paper {options.name}`. {inspect.getdoc(run)}", "", *lines]
    out = options.out / f"paper-{options.name}" if options.out else None
    write(results, "\n".join(text), out)
    if out is not None:
        draw(out.with_suffix(".png"))


if __name__ == "__main__":
    main()
