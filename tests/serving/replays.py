"""A stand-in for captured CUDA graphs, over CPU tensors: replaying a graph runs its program again."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network.decode_graphs import Captured  # noqa: E402


class Replays:
    """Captures programs; a replay writes into the tensors that the capture returned."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> Captured:
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
