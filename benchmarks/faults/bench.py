"""`python -m benchmarks.faults --kills N`: lost and wrong answers while workers of all roles are killed under load.

See `benchmarks/faults/kills.py`. Writes faults-kills.json and faults-kills.md. Start-up and recovery times are those of
`benchmarks.start`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine_load
from benchmarks.common.report import write
from benchmarks.faults import kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="kill so many workers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    results: dict[str, Any] = {"command": f"python -m benchmarks.faults --kills {options.kills} --seed {options.seed}"}
    results["load_before"] = machine_load()
    with tempfile.TemporaryDirectory(prefix="trinity-kills-") as home:
        results["kills"] = kills.kills(Path(home), options.kills, options.seed)
    results["load_after"] = machine_load()
    write(results, kills.report(results), options.out / "faults-kills")
    return 1 if kills.failures(results["kills"]) else 0
