"""How far a long build has come: bars on a terminal, a line now and then anywhere else."""

import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_WORDS = {
    "read": "reading documents",
    "embed": "embedding",
    "neighbors": "finding neighbors",
    "graph": "connecting the graph",
    "better neighbors": "finding better neighbors",
}
_LINE_EVERY_S = 10.0


class BuildProgress:
    """A callable for the `progress` of builds: (stage, part done from 0 to 1). Use as a context manager."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._done: set[str] = set()
        self._spoke = clock()
        console = Console(file=stream)
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:20}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
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
        began = self._began.setdefault(stage, self._clock())
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(words, total=1.0)
            self._bars.update(self._tasks[stage], completed=done)
        elif stage in self._done:
            pass  # a stage's parts may each say that it is done; that is told once
        elif done >= 1.0:
            self._done.add(stage)
            self._say(f"{words}: done in {self._clock() - began:.1f} s")
        elif self._clock() - self._spoke >= _LINE_EVERY_S:
            self._say(f"{words}: {done:.0%}")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._spoke = self._clock()
