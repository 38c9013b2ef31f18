"""Tests of decode steps by captured graphs, over CPU tensors, where replaying a graph runs the pass again."""

import pytest

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network.decode_graphs import DecodeGraphs  # noqa: E402
from runtime.serving.network.llama import Llama  # noqa: E402
from runtime.serving.network.paged_cache import PagedBatch, PagedCache, Span  # noqa: E402
from tests.serving.replays import Replays, pass_of  # noqa: E402


def spans_of(seed: int, lengths: list[int]) -> tuple[list[Span], list[int]]:
    """Return rows of the given lengths in their own blocks, and their next tokens."""
    return pass_of(seed, [(length, 1) for length in lengths])


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
        found = DecodeGraphs(network, cache, Replays()).logits(spans, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.kv, written, rtol=1e-5, atol=1e-5)
    assert (cache.kv != before).any()


def test_a_graph_is_captured_once_per_bucket_and_replayed_every_step(network: Llama, cache: PagedCache) -> None:
    capture = Replays()
    graphs = DecodeGraphs(network, cache, capture)
    with torch.inference_mode():
        for step, (lengths, captures) in enumerate(
            [([3, 4, 5], 1), ([40, 41, 42, 43], 1), ([255, 1, 1], 1), ([256, 1, 1], 2), ([9], 3), ([200], 3)]
        ):
            spans, tokens = spans_of(step, lengths)
            found = graphs.logits(spans, tokens).clone()
            assert (capture.captures, capture.replays) == (captures, step + 1)
            torch.testing.assert_close(found, network.logits(PagedBatch(cache, spans, tokens)), rtol=1e-5, atol=1e-5)
