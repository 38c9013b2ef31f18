"""Tests of decode steps by captured graphs, over CPU tensors, where replaying a graph runs the pass again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.serving.model.model_info import ModelInfo, read_config

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network.decode_graphs import Captured, DecodeGraphs  # noqa: E402
from runtime.serving.network.llama import Llama, WeightFiles  # noqa: E402
from runtime.serving.network.paged_cache import PagedBatch, PagedCache, Span  # noqa: E402

BLOCK, BLOCKS = 16, 96


class Again:
    """Fake CUDA graph capture: a replay runs the pass again into the same output tensor."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> Captured:
        self.captures += 1
        output = run().clone()

        def replay() -> None:
            self.replays += 1
            output.copy_(run())

        return Captured(replay, output)


@pytest.fixture
def network(tiny_directory: Path) -> Llama:
    info = ModelInfo.read(tiny_directory)
    return Llama.load(read_config(tiny_directory), info, WeightFiles(tiny_directory), "cpu")


@pytest.fixture
def cache(tiny_directory: Path) -> PagedCache:
    info = ModelInfo.read(tiny_directory)
    random = torch.Generator().manual_seed(1)
    return PagedCache(torch.randn(info.kv_shape(BLOCKS, BLOCK), generator=random), "gathered")


def spans_of(seed: int, lengths: list[int]) -> tuple[list[Span], list[int]]:
    """Return rows of the given lengths in their own blocks, and their next tokens."""
    random = np.random.default_rng(seed)
    order = random.permutation(BLOCKS).tolist()
    spans: list[Span] = []
    for length in lengths:
        count = length // BLOCK + 1
        spans.append((order[:count], length, 1))
        order = order[count:]
    return spans, random.integers(0, 259, len(lengths)).tolist()


@pytest.mark.parametrize("lengths", [[0], [5, 300], [1, 17, 40], [255, 256, 31, 2, 100]])
def test_a_graph_returns_the_logits_of_the_pass_and_writes_the_same_keys(
    network: Llama, cache: PagedCache, lengths: list[int]
) -> None:
    spans, tokens = spans_of(len(lengths), lengths)
    before = cache.kv.clone()
    with torch.inference_mode():
        expected = network.logits(PagedBatch(cache, spans, tokens))
        written = cache.kv.clone()
        cache.kv.copy_(before)
        found = DecodeGraphs(network, cache, Again()).logits(spans, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.kv, written, rtol=1e-5, atol=1e-5)
    assert (cache.kv != before).any()


def test_a_graph_is_captured_once_per_bucket_and_replayed_every_step(network: Llama, cache: PagedCache) -> None:
    capture = Again()
    graphs = DecodeGraphs(network, cache, capture)
    with torch.inference_mode():
        for step, (lengths, captures) in enumerate(
            [([3, 4, 5], 1), ([40, 41, 42, 43], 1), ([255, 1, 1], 1), ([256, 1, 1], 2), ([9], 3), ([200], 3)]
        ):
            spans, tokens = spans_of(step, lengths)
            found = graphs.logits(spans, tokens).clone()
            assert (capture.captures, capture.replays) == (captures, step + 1)
            torch.testing.assert_close(found, network.logits(PagedBatch(cache, spans, tokens)), rtol=1e-5, atol=1e-5)
