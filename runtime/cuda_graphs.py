"""Capture of CUDA graphs with torch, for models and embedders: many kernels become one launch."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_capturing = threading.Lock()
"""Of this process: a capture begins with a synchronisation of the device, which would fail during another capture."""


class Captured(NamedTuple):
    """A captured pass: `replay` runs it with the current contents of its inputs and writes `output`."""

    replay: Callable[[], None]
    output: Any


Capture = Callable[[Callable[[], Any]], Captured]


class CudaCapture:
    """Capture on the current device. The graphs share one memory pool: each output is consumed before the graph is
    replayed again, and intermediate tensors before another one is."""

    def __init__(self, *, warm_up: bool = True) -> None:
        """`warm_up`: run before each capture, to keep first-call allocations and algorithm choices out of the graph."""
        self._pool, self._warm_up = torch.cuda.graph_pool_handle(), warm_up

    def __call__(self, run: Callable[[], Any]) -> Captured:
        if self._warm_up:
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                run()
            current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": another thread, which embeds on the same GPU, may allocate memory meanwhile.
        with _capturing, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return Captured(graph.replay, output)
