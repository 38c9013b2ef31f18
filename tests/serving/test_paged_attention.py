"""Tests of decode's paged attention as torch compiles it for this processor: the calls are those on a GPU, the kernel
differs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.serving.model.model_info import ModelInfo, WeightsType
from tests.cuda.emulation import require_compiler

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.cuda_graphs import Captured  # noqa: E402
from runtime.serving.network.decode_attention import PagedAttention  # noqa: E402
from runtime.serving.network.decode_graphs import DecodeGraphs, supports_paged_attention  # noqa: E402
from runtime.serving.network.llama import Llama  # noqa: E402
from runtime.serving.network.paged_cache import PagedBatch, PagedCache, attend, store  # noqa: E402
from tests.serving.replays import Replays, greedy  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # in torch's compiler
    pytest.mark.timeout(900),  # it compiles on cores that others use, too
]
BLOCK, BLOCKS, STEPS = 16, 40, 20
LENGTHS = [1, 50, 31]
SCRATCH = (7, 3, 20, 9)


@pytest.fixture(autouse=True)
def _compiler() -> None:
    require_compiler()


def empty_kv(directory: Path, kind: WeightsType) -> Any:
    return torch.zeros(ModelInfo.read(directory).kv_shape(BLOCKS, BLOCK), dtype=getattr(torch, kind))


def answers(network: Llama, cache: PagedCache) -> list[list[int]]:
    """Return `STEPS` greedy tokens of each of three rows in scattered blocks, two of which share one."""
    random = np.random.default_rng(4)
    order = random.permutation(BLOCKS).tolist()
    tables = [order[8 * row : 8 * row + 8] for row in range(3)]
    prompts = [random.integers(0, 259, length).tolist() for length in LENGTHS]
    prompts[2][:BLOCK] = prompts[1][:BLOCK]
    tables[2][0] = tables[1][0]
    return greedy(network, cache, tables, prompts, STEPS, DecodeGraphs(network, cache, Replays()))


def test_float32_gives_the_greedy_tokens_of_gathered_attention(network: Llama, tiny_directory: Path) -> None:
    gathered = answers(network, PagedCache(empty_kv(tiny_directory, "float32"), "gathered"))
    paged = PagedCache(empty_kv(tiny_directory, "float32"), "paged", row_blocks=2 * BLOCKS)
    assert answers(network, paged) == gathered


def test_nan_in_freed_blocks_does_not_affect_their_next_sequence(tiny_directory: Path) -> None:
    kv = empty_kv(tiny_directory, "float32")
    cache = PagedCache(kv, "paged", row_blocks=2 * BLOCKS)
    heads, dim = 2, kv.shape[5]

    def attended(blocks: list[int], tokens: int, projected: Any) -> Any:
        batch = PagedBatch(cache, [([block], 0, tokens) for block in blocks], [9] * len(projected))
        store(kv[0], batch.numbers[2], batch.numbers[3], projected[:, -2 * heads :].nan_to_num())
        return attend(batch, 0, projected[:, : -2 * heads], projected[:, -2 * heads :], 1.0)

    with torch.inference_mode():
        attended([5], 6, torch.full((6, 4 + 2 * heads, dim), float("nan")))
        healthy = torch.randn(3, 4 + 2 * heads, dim)
        value = healthy[:, -heads:].repeat_interleave(2, dim=1)
        found = attended([5, 6, 7], 1, healthy)
        torch.testing.assert_close(found, value)  # a first token attends only to itself


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64])
def test_thread_blocks_read_enough_pages_at_once_to_saturate_a_gpu_s_memory(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H200: 132 multiprocessors of which each wants 24 KB in flight. A block waits for one page of keys or of values
    two thirds of the time."""
    kv_heads, head_dim, options, page = 8, 64, dict[str, int](), 32

    def recorded(query: Any, *_: Any, kernel_options: dict[str, int], **__: Any) -> Any:
        options.update(kernel_options)
        return query

    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", recorded)
    monkeypatch.setattr("runtime.serving.network.decode_attention._multiprocessors", lambda device: 132)
    keys = torch.zeros(64, kv_heads, page, head_dim, dtype=torch.bfloat16)
    paged = PagedAttention(torch.zeros(rows, 64, dtype=torch.long), torch.full((rows,), 2048), 64, kv_heads, page)
    with torch.compiler.set_stance("force_eager"):
        paged.attend(keys.new_zeros(rows, kv_heads, 4, head_dim), keys, keys, 1.0)
    blocks = max(rows, 2) * kv_heads * options["SPLIT_KV"]
    pages_of_a_block = 64 / options["SPLIT_KV"]
    in_flight = blocks / 132 * page * head_dim * 2 * 2 / 3
    assert in_flight >= 24 * 1024 or pages_of_a_block <= 2, "few rows: their few pages are read in two waits each"


def test_gathered_attention_is_the_fallback_if_compilation_fails_or_is_wrong(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kv = empty_kv(tiny_directory, "float32")
    assert supports_paged_attention(kv, 2 * BLOCKS, 2, SCRATCH)
    assert not kv.any()
    assert supports_paged_attention(kv, 2 * BLOCKS, 2, SCRATCH, Replays())
    assert not supports_paged_attention(kv, 2 * BLOCKS, 2, SCRATCH, lambda run: Captured(lambda: None, run())), (
        "a replay reads nothing"
    )
    assert "returned a wrong result" in caplog.text
    caplog.clear()
    assert not supports_paged_attention(kv[:, :, :, :, :12], 2 * BLOCKS, 2, SCRATCH), "no kernel has blocks of 12"
    assert not supports_paged_attention(kv, 8, 2, SCRATCH), "torch's CPU kernel requires as many pages per row as exist"
    assert "failed: " in caplog.text
    monkeypatch.setattr("runtime.serving.network.decode_attention._compiled", lambda: lambda query, *_: query)
    assert not supports_paged_attention(kv, 2 * BLOCKS, 2, SCRATCH)
    assert "returned a wrong result" in caplog.text
    assert not kv.any()
