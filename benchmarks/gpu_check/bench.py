"""Correctness and speed of search and model on a GPU, next to cuVS: one run, one JSON file, one table.

    python -m benchmarks.gpu_check [--rows 1000000] [--device cuda:0] [--out DIR]
    python -m benchmarks.gpu_check --data DIR [--set NAME] [--index DIR]
    python -m benchmarks.gpu_check --dry-run          every section on the CPU backend, at a tiny size
    python -m benchmarks.gpu_check --carry DIR        pack wheels for an offline machine with torch and CuPy

Without --data, two synthetic sets are generated on the device: a million clustered vectors of 96 and of 768 dims, in
float16. DIR contains NAME.base.npy, NAME.query.npy and NAME.truth.npy (`benchmarks.common.data`); --index is an index
directory over that set's base (`trinity index build` writes one to COLLECTION/index). Otherwise graphs are built by
cuVS on the GPU, or without it on the CPU.

Needs numpy and numba, and on a GPU the extra [cuda]. The first section opens the device, launches each form and
compares its results with the CPU engine's, in 20 seconds at most; the run ends if it fails. A section whose other
packages are missing is skipped with a message; one that fails or exceeds its time limit keeps its lines. Writes
gpu-DEVICE.json and gpu-DEVICE.md after every section, with a verdict for each target of `benchmarks.gpu_check.targets`.
Failed sections and missed targets make the exit code 1. No section starts after --seconds; with the sections' time
limits a run takes less than nine minutes.
"""

import argparse
import contextlib
import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, str(min(4, len(os.sched_getaffinity(0)))))

from benchmarks.common.report import keep  # noqa: E402
from benchmarks.gpu_check.compiling import compile_in_background  # noqa: E402
from benchmarks.gpu_check.report import Outcome, markdown  # noqa: E402
from benchmarks.gpu_check.setup import Setup, prepare  # noqa: E402
from benchmarks.gpu_check.targets import SET_TARGETS, verdicts  # noqa: E402
from benchmarks.gpu_check.time_limit import OutOfTime, Skipped, within  # noqa: E402
from benchmarks.gpu_check.wheels import pack_wheels  # noqa: E402
from gpu import DeviceUnavailable  # noqa: E402

_OURS = ("benchmarks", "gpu", "ipc", "runtime")
_DRY_RUN_S = 180.0  # a section's time limit on a busy CPU

Check = Callable[[Setup, Outcome], None]


class Section(NamedTuple):
    """A section: its check, its time limit in seconds on a GPU, whether it runs for each data set, and whether it runs
    first and ends the run if it fails."""

    check: Check
    seconds: float
    each_set: bool = False
    essential: bool = False


def _module(name: str) -> Check:
    """Return a module's `check`, imported when it runs: a missing package must not affect other sections."""

    def check(setup: Setup, outcome: Outcome) -> None:
        try:
            importlib.import_module(f"benchmarks.gpu_check.sections.{name}").check(setup, outcome)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", *_OURS):
                raise
            raise Skipped(f"{package} is not installed") from None

    return check


SECTIONS = {
    "forms": Section(_module("forms"), 22, essential=True),
    "data": Section(_module("data"), 57, each_set=True),
    "steps": Section(_module("steps"), 25, each_set=True),
    "kernels": Section(_module("kernels"), 15, each_set=True),
    "load": Section(_module("load"), 20, each_set=True),
    "cuvs": Section(_module("peers"), 33, each_set=True),
    "resident": Section(_module("resident"), 20, each_set=True),  # after cuvs, whose measured rate it uses
    "flood": Section(_module("flood"), 24, each_set=True),
    "correctness": Section(_module("correctness"), 32),
    "exchange": Section(_module("exchange"), 12),
    "model": Section(_module("model"), 18),
    "embedding": Section(_module("embedding"), 14),
    "handover": Section(_module("handover"), 16),
    "profile": Section(_module("profile"), 18),
    "sanitizer": Section(_module("sanitizer"), 20),  # last: slow and optional
}


def schedule(setups: Sequence[Setup]) -> Iterator[tuple[str, Section, Setup]]:
    """Yield sections in order, by name: essential ones, those of each data set, set by set, then the others."""
    for name, section in SECTIONS.items():
        if section.essential:
            yield name, section, setups[0]
    for setup in setups:
        for name, section in SECTIONS.items():
            if section.each_set:
                yield f"{name}, {setup.source.name}", section, setup
    for name, section in SECTIONS.items():
        if not section.each_set and not section.essential:
            yield name, section, setups[0]


def run(setups: Sequence[Setup], begin: float, seconds: float, path: Path) -> dict[str, Outcome]:
    """Run all sections. Returns outcomes by name. Writes results after each: a later section may crash the process.

    No section starts or runs later than `seconds` after `begin` (of `time.monotonic()`).
    """
    outcomes: dict[str, Outcome] = {}
    for name, section, setup in schedule(setups):
        outcome = outcomes[name] = Outcome()
        print(name, flush=True)
        at = time.monotonic()
        left = begin + seconds - at
        try:
            if left <= 0:
                raise Skipped(f"{at - begin:.0f} s have passed; the limit is {seconds:.0f} s")
            with within(min(left, _DRY_RUN_S if setup.small else section.seconds)):
                section.check(setup, outcome)
        except Skipped as reason:
            outcome.add("", f"skipped: {reason}")
        except OutOfTime as error:
            outcome.failed = True
            outcome.add("", f"FAILED: {error}")
        except Exception as error:
            outcome.failed = True
            outcome.data["where"] = traceback.format_exc()
            outcome.add("", f"FAILED: {type(error).__name__}: {error}")
        finally:
            outcome.seconds = time.monotonic() - at
            write(setups, outcomes, path)
        if outcome.failed and section.essential:
            print("nothing else is measured: the engine does not start on this device", flush=True)
            break
    return outcomes


def verdicts_of(setups: Sequence[Setup], outcomes: Mapping[str, Outcome]) -> list[tuple[str, str, str]]:
    """Return the verdicts on the results so far: for each data set, then of the sections that run once."""
    judged = []
    for setup in setups:
        results = {name: outcomes[key].data for name in SECTIONS if (key := f"{name}, {setup.source.name}") in outcomes}
        dim = setup.given[1].dim if setup.given else setup.source.dim
        judged += [
            (f"{what}, {setup.source.name}", figure, verdict)
            for what, figure, verdict in verdicts(results, SET_TARGETS, dim)
        ]
    return judged + verdicts({name: outcome.data for name, outcome in outcomes.items()})


def write(setups: Sequence[Setup], outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Write PATH.json and PATH.md."""
    judged = verdicts_of(setups, outcomes)
    sections = {
        name: {"seconds": outcome.seconds, "lines": outcome.lines, "data": outcome.data}
        for name, outcome in outcomes.items()
    }
    settings = {setup.source.name: setup.settings for setup in setups}
    record = {"machine": setups[0].machine, "settings": settings, "verdicts": judged, "sections": sections}
    keep(record, markdown(setups, outcomes, judged), path)


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
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16"))
    parser.add_argument("--rows", type=int, help="rows of a synthetic set, or the first rows of a given one")
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--top-m", type=int, default=0, help="0: the smallest with a recall@10 of 0.95")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--carry", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.carry is not None:
        pack_wheels(options.carry)
        return 0
    begin = time.monotonic()
    try:
        setups = prepare(options)
    except DeviceUnavailable as error:
        parser.error(f"--device {options.device}: {error}")
    except Exception:
        keep(
            {"setup": traceback.format_exc()},
            f"# The setup failed\n\n{traceback.format_exc()}",
            options.out / "gpu-setup",
        )
        raise
    path = options.out / f"gpu-{setups[0].file_name}"
    with contextlib.nullcontext() if options.dry_run else compile_in_background():
        outcomes = run(setups, begin, options.seconds, path)
    judged = verdicts_of(setups, outcomes)
    if options.dry_run:
        print("dry run: the verdicts do not apply to a GPU")
    for what, figure, verdict in judged:
        print(f"{verdict:12} {what}: {figure}")
    print(f"wrote {path.with_suffix('.json')} and {path.with_suffix('.md')}")
    missed = not options.dry_run and any(verdict == "FAIL" for _, _, verdict in judged)
    return int(missed or any(outcome.failed for outcome in outcomes.values()))
