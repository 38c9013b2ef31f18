"""Tests of passes by captured graphs, over CPU tensors, where replaying a graph runs its program again."""

from itertools import pairwise

import pytest

from runtime.node.worker_config import PrefillSection

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network.decode_graphs import DecodeGraphs  # noqa: E402
from runtime.serving.network.llama import Llama  # noqa: E402
from runtime.serving.network.paged_cache import PagedBatch, PagedCache  # noqa: E402
from runtime.serving.network.prefill_graphs import MAX_TOKENS, PrefillGraphs, sizes_up_to  # noqa: E402
from tests.serving.replays import Replays, pass_of  # noqa: E402

Parts = list[tuple[int, int]]  # start and tokens of each chunk
STEPS: list[Parts] = [[(n, 1) for n in lengths] for lengths in ([0], [5, 300], [1, 17, 40], [255, 256, 31, 2, 100])]
PROMPTS: list[Parts] = [
    [(0, 2)], [(0, 64)], [(0, 65)], [(40, 33)], [(0, 20), (7, 30), (64, 2)], [(5, 1), (0, 90), (31, 1), (16, 40)]
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "parts"),
    [*((DecodeGraphs, parts) for parts in STEPS), *((PrefillGraphs, parts) for parts in PROMPTS)],
)
def test_a_graph_returns_the_logits_of_the_pass_and_writes_the_same_keys(
    network: Llama, cache: PagedCache, kind: type[DecodeGraphs] | type[PrefillGraphs], parts: Parts
) -> None:
    graphs, before = kind(network, cache, Replays()), cache.kv.clone()
    with torch.inference_mode():
        for seed in range(3):  # the first one captures
            spans, tokens = pass_of(seed, parts)
            cache.kv.copy_(before)
            expected = network.logits(PagedBatch(cache, spans, tokens))
            written = cache.kv.clone()
            cache.kv.copy_(before)
            found = graphs.logits(spans, tokens)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(cache.kv, written, rtol=1e-5, atol=1e-5)
            assert (cache.kv != before).any()


def test_steps_are_captured_once_per_bucket_and_replayed_every_time(network: Llama, cache: PagedCache) -> None:
    capture = Replays()
    graphs = DecodeGraphs(network, cache, capture)
    with torch.inference_mode():
        for step, (lengths, captures) in enumerate(
            [([3, 4, 5], 1), ([40, 41, 42, 43], 1), ([255, 1, 1], 1), ([256, 1, 1], 2), ([9], 3), ([200], 3)]
        ):
            spans, tokens = pass_of(step, [(length, 1) for length in lengths])
            found = graphs.logits(spans, tokens).clone()
            assert (capture.captures, capture.replays) == (captures, step + 1)
            torch.testing.assert_close(found, network.logits(PagedBatch(cache, spans, tokens)), rtol=1e-5, atol=1e-5)


def test_a_size_of_prompts_is_captured_once_a_layer_and_replayed_for_any_chunks(
    network: Llama, cache: PagedCache
) -> None:
    capture = Replays()
    graphs, layers = PrefillGraphs(network, cache, capture), len(cache.layers)
    with torch.inference_mode():
        for step, (parts, sizes, replayed) in enumerate(
            [([(0, 40)], 1, 0), ([(16, 64)], 1, 1), ([(0, 9), (3, 1)], 1, 2), ([(0, 70)], 2, 2), ([(9, 96)], 2, 3)]
        ):
            graphs.logits(*pass_of(step, parts))
            assert (capture.captures, capture.replays) == (sizes * layers, replayed * layers)


def test_passes_have_the_configured_tokens_by_default_few_on_cpus_and_what_is_captured_on_gpus() -> None:
    assert PrefillSection(devices=("cuda:0",)).pass_tokens == MAX_TOKENS
    assert PrefillSection().pass_tokens == 256
    assert PrefillSection(devices=("cuda:0",), chunk_tokens=48).pass_tokens == 48


def test_padding_is_at_most_half_and_every_size_is_warmed_up() -> None:
    sizes = sizes_up_to(MAX_TOKENS)
    assert sizes[-1] == MAX_TOKENS
    assert all(larger <= 1.5 * size for size, larger in pairwise(sizes))
    assert sizes_up_to(200) == [64, 96, 128, 192, 200]
    assert sizes_up_to(2) == [2]
    assert sizes_up_to(0) == []
