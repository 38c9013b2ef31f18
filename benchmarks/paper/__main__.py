"""`python -m benchmarks.paper NAME [--data DIR] [--out DIR]`: an experiment, its table and its plot.

All of it is simulated, where nothing else is said on eight GPUs with service times from data sheets.
"""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.report import write
from benchmarks.paper.figure1 import figure1
from benchmarks.paper.planner import planner
from benchmarks.paper.pool import Found, batching, placements, reserve
from benchmarks.paper.splits import chunks, splits

EXPERIMENTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    run.__name__: run for run in (figure1, batching, placements, reserve, splits, chunks, planner)
}


def main() -> None:
    """Run one experiment."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, help="a folder of traces, as benchmarks.policy has it")
    parser.add_argument("--times", type=Path, help="what `trinity calibrate` wrote, for figure1")
    parser.add_argument("--out", type=Path, help="where paper-NAME.json, .md and .png are written")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    run = EXPERIMENTS[options.name]
    figures, lines, draw = run(options)
    text = [f"# {options.name}", "", f"`python -m benchmarks.paper {options.name}`. {inspect.getdoc(run)}", "", *lines]
    out = options.out / f"paper-{options.name}" if options.out else None
    write(figures, "\n".join(text), out)
    if out is not None:
        draw(out.with_suffix(".png"))


if __name__ == "__main__":
    main()
