"""Progress reporting for long builds: progress bars on a terminal, occasional lines elsewhere.

In a sharded build each shard passes through all stages; a stage's time is the sum over the shards.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_LABELS = {
    "compare": "comparing files",
    "read": "reading documents",
    "embed": "embedding",
    "follow": "following",
    "neighbors": "finding neighbors",
    "graph": "connecting the graph",
    "better neighbors": "finding better neighbors",
    "rows": "reading rows",
    "write": "writing the segment",
}
_LINE_EVERY_S = 10.0


class BuildProgress:
    """A `progress` callback for builds: (stage, share done from 0 to 1). Use as a context manager."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._tasks: dict[str, TaskID] = {}
        self._elapsed_s: dict[str, float] = defaultdict(float)
        self._done: set[str] = set()
        self._printed_s = self._updated_s = clock()
        console = Console(file=stream)
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description:20}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[elapsed]}"),
                TimeRemainingColumn(),
                console=console,
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: float) -> None:
        """Report that `stage` is done up to this share."""
        label = _LABELS.get(stage, stage)
        now = self._clock()
        self._elapsed_s[stage] += now - self._updated_s  # stages report at their start and after each part
        self._updated_s = now
        elapsed = f"{self._elapsed_s[stage]:.1f} s"
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(label, total=1.0, elapsed=elapsed)
            self._bars.update(self._tasks[stage], completed=done, elapsed=elapsed)
        elif stage in self._done:
            pass  # every shard reports completion; print it once
        elif done >= 1.0:
            self._done.add(stage)
            self._print(f"{label}: done in {elapsed}")
        elif self._clock() - self._printed_s >= _LINE_EVERY_S:
            self._print(f"{label}: {done:.0%}")

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._printed_s = self._clock()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
