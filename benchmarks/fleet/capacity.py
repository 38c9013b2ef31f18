"""Capacity of several nodes against one, simulated: `python -m benchmarks.fleet.capacity --config FILE --trace FILE`.

The highest rate at which 90% of a trace's requests meet both SLOs (0: none), on one simulated node, and on several with
round-robin requests. A real balancer routes by load, which this does not model; its own cost is measured by
`benchmarks.fleet`.
"""

import argparse
from pathlib import Path

from benchmarks.common.report import table, write
from runtime.errors import TrinityError
from runtime.node.config_file import load_config
from runtime.simulator.plan import greatest_rate
from runtime.simulator.setup import Setup
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import load_trace
from runtime.simulator.workload import Slos

SHARE = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="configuration file of a node (TOML)")
    parser.add_argument("--trace", type=Path, required=True, action="append", help="trace file (repeatable)")
    parser.add_argument("--times", type=Path, help="service times from `trinity calibrate`; default: an H100")
    parser.add_argument("--ttft", type=float, help="SLO: time to first token in seconds; default: [slo]")
    parser.add_argument("--tpot", type=float, help="SLO: time per output token in seconds; default: [slo]")
    parser.add_argument("--limit", type=int, default=2000, help="maximum requests per trace")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="output files OUT.md and OUT.json")
    options = parser.parse_args()
    if options.nodes < 1:
        parser.error(f"--nodes is {options.nodes}: must be at least 1")
    config = load_config(options.config)
    times = ServiceTimes() if options.times is None else ServiceTimes.load(options.times)
    slos = Slos(ttft_s=options.ttft or config.slo.ttft_s, tpot_s=options.tpot or config.slo.tpot_s)
    setup = Setup(config=config, times=times, slos=slos, seed=options.seed)
    head = ["trace", "one node, requests/s", f"{options.nodes} nodes, requests/s", "ratio"]
    rows = []
    for path in options.trace:
        arrivals = load_trace(path, options.limit)
        one = greatest_rate(setup, arrivals, SHARE)
        several = greatest_rate(setup, arrivals, SHARE, options.nodes)
        rows.append(
            [path.name.partition(".")[0], f"{one:.2f}", f"{several:.2f}", f"{several / one:.2f}" if one else "–"]
        )
    caption = f"{options.config.name}, service times: {times.source}; SLO: first token within {slos.ttft_s:g} s, "
    caption += f"{slos.tpot_s * 1e3:g} ms per output token, by {SHARE:.0%} of {options.limit} requests; "
    caption += f"seed {options.seed}"
    write(
        [dict(zip(head, row, strict=True)) for row in rows], "\n".join([caption, "", *table(head, rows)]), options.out
    )


if __name__ == "__main__":
    try:
        main()
    except TrinityError as error:
        raise SystemExit(f"error: {error.message}") from error
