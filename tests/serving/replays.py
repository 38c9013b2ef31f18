"""Stand-ins for captured CUDA graphs, over CPU tensors, and for the process that compiles a model."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.cuda_graphs import Captured  # noqa: E402
from runtime.serving.model.compilation import CompilerProcess, ModelSetup  # noqa: E402


class Replays:
    """Captures programs; a replay runs its program again, and writes into the tensors that the capture returned.

    `room`: for how many captures there is memory, None for any number."""

    def __init__(self, room: int | None = None) -> None:
        self.captures = self.replays = 0
        self.room = room

    def __call__(self, run: Callable[[], Any]) -> Captured:
        if self.captures == self.room:
            raise torch.OutOfMemoryError("out of memory")
        self.captures += 1
        output = run()

        def replay() -> None:
            self.replays += 1
            for kept, new in zip(_tensors(output), _tensors(run()), strict=True):
                kept.copy_(new)

        return Captured(replay, output)


def _tensors(value: Any) -> list[Any]:
    if value is None or isinstance(value, torch.Tensor):
        return [] if value is None else [value]
    return [tensor for part in value for tensor in _tensors(part)]


class EndsWhenTold(CompilerProcess):
    """A process that compiles (`Compilation`), and ends when the test says so."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.started = self.closed = False

    def __call__(self, setup: ModelSetup) -> "EndsWhenTold":
        self.started = True
        return self

    @property
    def reason(self) -> str:
        return "no compiler here"

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> None:
        self.code = 0

    def close(self) -> None:
        self.closed = True
