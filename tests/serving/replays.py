"""Stand-ins for captured CUDA graphs, over CPU tensors, and for the process that compiles a model; passes over a paged
cache, and what they are made of."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from runtime.cuda_graphs import Captured  # noqa: E402
from runtime.serving.model.compilation import CompilerProcess, ModelSetup  # noqa: E402
from runtime.serving.network.decode_graphs import DecodeGraphs  # noqa: E402
from runtime.serving.network.llama import Llama  # noqa: E402
from runtime.serving.network.paged_cache import PagedBatch, PagedCache, Span  # noqa: E402

BLOCK, BLOCKS = 16, 160


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


def pass_of(seed: int, parts: Sequence[tuple[int, int]]) -> tuple[list[Span], list[int]]:
    """Return chunks of (start, tokens), each in blocks of its own, and their tokens."""
    random = np.random.default_rng(seed)
    order, spans = random.permutation(BLOCKS).tolist(), list[Span]()
    for start, count in parts:
        blocks = -(-(start + count) // BLOCK)
        spans.append((order[:blocks], start, count))
        order = order[blocks:]
    return spans, random.integers(0, 259, sum(count for _, count in parts)).tolist()


def greedy(
    network: Llama,
    cache: PagedCache,
    tables: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    steps: int,
    graphs: DecodeGraphs | None = None,
) -> list[list[int]]:
    """Return `steps` greedy tokens after each prompt, whose row has these blocks; three of four steps by `graphs`."""
    with torch.inference_mode():
        spans: list[Span] = [(table, 0, len(prompt)) for table, prompt in zip(tables, prompts, strict=True)]
        logits = network.logits(PagedBatch(cache, spans, [token for prompt in prompts for token in prompt]))
        found = [[int(token)] for token in logits.argmax(-1)]
        for step in range(steps - 1):
            last = [row[-1] for row in found]
            spans = [(table, len(prompt) + step, 1) for table, prompt in zip(tables, prompts, strict=True)]
            by_graph = graphs is not None and step % 4
            logits = graphs.logits(spans, last) if by_graph else network.logits(PagedBatch(cache, spans, last))  # type: ignore[union-attr]
            for row, token in zip(found, logits.argmax(-1), strict=True):
                row.append(int(token))
    return found


class Operations(TorchDispatchMode):
    """Counts torch operations: by name, and all that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("index", "index_put_") and any(at is not None and at.dtype == torch.bool for at in args[1]):
            name = "nonzero"  # torch counts the mask's true entries
        self.names[name] += 1
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))
