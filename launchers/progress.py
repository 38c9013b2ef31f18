"""How far a long build has come: bars on a terminal, a line now and then anywhere else.

Where an index is split, each shard goes through all stages: a stage's time is what its parts took together.
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

_WORDS = {
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
    """A callable for the `progress` of builds: (stage, part done from 0 to 1). Use as a context manager."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._tasks: dict[str, TaskID] = {}
        self._took_s: dict[str, float] = defaultdict(float)
        self._done: set[str] = set()
        self._spoke = self._heard = clock()
        console = Console(file=stream)
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description:20}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[took]}"),
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
        """Show that `stage` is done up to this part."""
        words = _WORDS.get(stage, stage)
        now = self._clock()
        self._took_s[stage] += now - self._heard  # a stage speaks when it begins, or when a part of it is done
        self._heard = now
        took = f"{self._took_s[stage]:.1f} s"
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(words, total=1.0, took=took)
            self._bars.update(self._tasks[stage], completed=done, took=took)
        elif stage in self._done:
            pass  # a stage's parts may each say that it is done; that is told once
        elif done >= 1.0:
            self._done.add(stage)
            self._say(f"{words}: done in {took}")
        elif self._clock() - self._spoke >= _LINE_EVERY_S:
            self._say(f"{words}: {done:.0%}")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._spoke = self._clock()
