"""Search and the model on a GPU: correct? how fast? beside what? One run, one JSON file, one table.

    python -m benchmarks.gpu_check --data DIR [--set NAME] [--index DIR] [--device cuda:0] [--out DIR]
    python -m benchmarks.gpu_check --dry-run          every step on the CPU backend, at a tiny size

DIR holds NAME.base.npy, NAME.query.npy and NAME.truth.npy (`benchmarks.common.data`); without --data the vectors are
random clusters. --index is an index directory of that set's base (`trinity index build` makes one as COLLECTION/index);
without it the index is built here, by cuVS where that is installed.

Needs numpy and numba, and on a GPU the extra [cuda]; what else a section needs and is not installed, it says, and is
skipped. Writes gpu-DEVICE.json and gpu-DEVICE.md, after every section, with a verdict for each bar of `verdicts`. A
section that cannot be done says why and the others go on; one that fails, and a bar that is missed, make the exit code
1. Sections that begin after --seconds (540) are left out and say so.
"""

import argparse
import importlib
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "4")

from benchmarks.common.report import keep  # noqa: E402
from benchmarks.gpu_check.report import Outcome, Skipped, markdown  # noqa: E402
from benchmarks.gpu_check.setup import Setup, prepare  # noqa: E402
from benchmarks.gpu_check.verdicts import verdicts  # noqa: E402
from gpu import DeviceUnavailable  # noqa: E402

_OURS = ("benchmarks", "gpu", "ipc", "runtime")


def _section(module: str) -> Callable[[Setup], Outcome]:
    """A module's `check`, imported at its turn: what one section needs is nothing that others should miss."""

    def check(setup: Setup) -> Outcome:
        try:
            done: Outcome = importlib.import_module(f"benchmarks.gpu_check.sections.{module}").check(setup)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in _OURS:
                raise
            raise Skipped(f"{error.name} is not installed") from None
        return done

    return check


SECTIONS = {
    "correctness": _section("correctness"),
    "steps": _section("steps"),
    "load": _section("load"),
    "cuvs": _section("peers"),
    "exchange": _section("exchange"),
    "model": _section("model"),
    "handover": _section("handover"),
    "sanitizer": _section("sanitizer"),  # last: it is slow, and nothing needs it
}


def run(setup: Setup, begin: float, seconds: float, path: Path) -> dict[str, Outcome]:
    """Every section's outcome, by its name. After each, all that is known is written: a later one may end the process.

    No section begins later than `seconds` after `begin`, in `time.monotonic()`.
    """
    outcomes: dict[str, Outcome] = {}
    for name, section in SECTIONS.items():
        at = time.monotonic()
        try:
            if at - begin > seconds:
                raise Skipped(f"{at - begin:.0f} s are over, the limit is {seconds:.0f}")
            outcome = section(setup)
        except Skipped as reason:
            outcome = Outcome([("", f"skipped: {reason}")])
        except Exception as error:
            where = traceback.format_exc()
            outcome = Outcome([("", f"FAILED: {type(error).__name__}: {error}")], {"where": where}, failed=True)
        outcome.seconds = time.monotonic() - at
        outcomes[name] = outcome
        for line, value in outcome.lines:
            print(f"{name:12} {line:44} {value}", flush=True)
        write(setup, outcomes, path)
    return outcomes


def verdicts_of(outcomes: dict[str, Outcome]) -> list[tuple[str, str, str]]:
    """What the bars say of what was found so far."""
    return verdicts({name: outcome.data for name, outcome in outcomes.items()})


def write(setup: Setup, outcomes: dict[str, Outcome], path: Path) -> None:
    """PATH.json and PATH.md."""
    judged = verdicts_of(outcomes)
    sections = {
        name: {"seconds": outcome.seconds, "lines": outcome.lines, "data": outcome.data}
        for name, outcome in outcomes.items()
    }
    record = {"machine": setup.machine, "settings": setup.settings, "verdicts": judged, "sections": sections}
    keep(record, markdown(setup, outcomes, judged), path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", default=None)
    parser.add_argument("--index", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "int8"))
    parser.add_argument("--rows", type=int, help="take the first rows of the set only")
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--top-m", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        setup = prepare(options)
    except DeviceUnavailable as error:
        parser.error(f"--device {options.device}: {error}")
    except Exception:
        keep(
            {"setup": traceback.format_exc()},
            f"# The setup failed\n\n{traceback.format_exc()}",
            options.out / "gpu-setup",
        )
        raise
    path = options.out / f"gpu-{setup.file_name}"
    outcomes = run(setup, begin, options.seconds, path)
    judged = verdicts_of(outcomes)
    if setup.small:
        print("a dry run: the verdicts say nothing of a GPU")
    for what, figure, verdict in judged:
        print(f"{verdict:12} {what}: {figure}")
    print(f"wrote {path.with_suffix('.json')} and {path.with_suffix('.md')}")
    missed = setup.on_gpu and any(verdict == "FAIL" for _, _, verdict in judged)
    return int(missed or any(outcome.failed for outcome in outcomes.values()))
