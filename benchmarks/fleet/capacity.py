"""Two nodes against one, simulated: `python -m benchmarks.fleet.capacity --config launchers/node8.toml --trace FILE`.

The greatest rate at which 90% of a trace's requests meet both SLOs (0: there is none), on one simulated node, and on
several that get the same requests in turn. A balancer goes by the load instead of turns, which this does not have; what
it costs itself `benchmarks.fleet` measures.
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
    parser.add_argument("--config", type=Path, required=True, help="a node's TOML file")
    parser.add_argument("--trace", type=Path, required=True, action="append", help="a trace; once for each")
    parser.add_argument("--times", type=Path, help="measured service times (`trinity calibrate`); else an H100's")
    parser.add_argument("--ttft", type=float, help="SLO: seconds to the first token; else as the file's [slo]")
    parser.add_argument("--tpot", type=float, help="SLO: seconds a token after it; else as the file's [slo]")
    parser.add_argument("--limit", type=int, default=2000, help="requests of a trace to take")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to keep the table: OUT.md and OUT.json")
    options = parser.parse_args()
    if options.nodes < 1:
        parser.error(f"--nodes is {options.nodes}: there must be one at least")
    config = load_config(options.config)
    times = ServiceTimes() if options.times is None else ServiceTimes.load(options.times)
    slos = Slos(ttft_s=options.ttft or config.slo.ttft_s, tpot_s=options.tpot or config.slo.tpot_s)
    setup = Setup(config=config, times=times, slos=slos, seed=options.seed)
    head = ["trace", "one node, requests/s", f"{options.nodes} nodes, requests/s", "times as many"]
    rows = []
    for path in options.trace:
        arrivals = load_trace(path, options.limit)
        one = greatest_rate(setup, arrivals, SHARE)
        several = greatest_rate(setup, arrivals, SHARE, options.nodes)
        rows.append(
            [path.name.partition(".")[0], f"{one:.2f}", f"{several:.2f}", f"{several / one:.2f}" if one else "–"]
        )
    said = f"{options.config.name}, service times: {times.source}; SLO: first token within {slos.ttft_s:g} s, "
    said += f"{slos.tpot_s * 1e3:g} ms a later token, by {SHARE:.0%} of {options.limit} requests; "
    said += f"seed {options.seed}"
    write([dict(zip(head, row, strict=True)) for row in rows], "\n".join([said, "", *table(head, rows)]), options.out)


if __name__ == "__main__":
    try:
        main()
    except TrinityError as error:
        raise SystemExit(f"error: {error.message}") from error
