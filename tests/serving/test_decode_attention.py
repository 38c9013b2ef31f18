"""Tests that both implementations of single-token attention agree with torch, for rows of any length in any blocks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network.cpu_kernels import rotate_and_store, weighted_sum  # noqa: E402
from runtime.serving.network.decode_attention import CpuAttention, GatheredAttention  # noqa: E402
from runtime.serving.network.decoder import rms_norm  # noqa: E402  (with torch's package)
from runtime.serving.network.paged_cache import apply_rope  # noqa: E402

BLOCKS, SIZE = 9, 8


def attend(kernels: str, rows: Any, query: Any, keys: Any, values: Any, scaling: float) -> Any:
    """keys and values [blocks, kv_heads, block_tokens, head_dim]."""
    if kernels == "cpu":
        return CpuAttention(rows, SIZE).attend(query, keys.numpy(), values.numpy(), scaling)
    width = max(len(table) for table, _ in rows)
    tables = torch.tensor([[*table, *[0] * (width - len(table))] for table, _ in rows])
    visible = torch.tensor([visible for _, visible in rows])
    gathered = GatheredAttention(tables, visible, int(visible.max()), SIZE)
    return gathered.attend(query, keys, values, scaling)


@pytest.mark.parametrize("kernels", ["cpu", "gathered"])
@given(
    rows=st.lists(
        st.tuples(st.permutations(range(BLOCKS)).map(lambda order: order[:5]), st.integers(1, 5 * SIZE)),
        min_size=1,
        max_size=6,
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([8, 16, 20]),
    seed=st.integers(0, 1000),
)
def test_each_row_attends_to_its_own_blocks_up_to_its_length(
    kernels: str, rows: list[tuple[list[int], int]], kv_heads: int, group: int, head_dim: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(len(rows), kv_heads, group, head_dim, generator=random) * 3
    keys, values = torch.randn(2, BLOCKS, kv_heads, SIZE, head_dim, generator=random)
    attended = attend(kernels, rows, query, keys, values, 0.3)
    for number, (table, visible) in enumerate(rows):
        seen = [side[table].transpose(0, 1).flatten(1, 2)[:, :visible] for side in (keys, values)]
        expected = torch.nn.functional.scaled_dot_product_attention(query[number], *seen, scale=0.3)
        torch.testing.assert_close(attended[number], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", ["cpu", "gathered"])
def test_memory_beyond_a_row_is_never_read(kernels: str) -> None:
    keys = torch.full((3, 1, 8, 4), float("nan"))
    keys[1, :, :3] = 1.0
    keys[0] = keys[2, :, :7] = 2.0
    attended = attend(kernels, [([1], 3), ([0, 2, 1], 15)], torch.ones(2, 1, 2, 4), keys, keys, 0.5)
    assert attended[0].eq(1.0).all()
    assert attended[1].eq(2.0).all()


def test_the_loops_are_compiled_only_for_their_types() -> None:
    numbers, places = np.zeros((1, 1, 1, 8)), np.zeros((1, 1), np.int64)
    with pytest.raises(TypeError, match="No matching definition"):
        weighted_sum(numbers, numbers, places, places[0], numbers)


def test_the_loops_rotate_queries_and_keys_as_torch_does_and_store_keys_and_values() -> None:
    tokens, heads, kv_heads, head_dim = 5, 4, 2, 12
    projected, half = torch.randn(tokens, heads + 2 * kv_heads, head_dim), torch.randn(tokens, head_dim // 2)
    angles = [torch.cat((side, side), -1) for side in (half.cos(), half.sin())]
    turned = apply_rope(projected[:, :-kv_heads], (angles[0], angles[1]))
    keys, values = torch.full((2, BLOCKS, kv_heads, SIZE, head_dim), float("nan"))
    blocks, offsets = torch.tensor([3, 3, 0, 8, 5]), torch.tensor([0, 1, 7, 2, 2])
    given = projected.clone()
    rotate_and_store(*(one.numpy() for one in (given, *angles, blocks, offsets, keys, values)))
    torch.testing.assert_close(given[:, :-kv_heads], turned)
    assert torch.equal(keys[blocks, :, offsets], given[:, heads:-kv_heads])
    assert torch.equal(values[blocks, :, offsets], projected[:, -kv_heads:])
    assert int(values.isfinite().sum()) == tokens * kv_heads * head_dim


def test_the_loops_compute_rms_norm() -> None:
    x, weight = torch.randn(3, 20), torch.rand(20)
    output = torch.empty(3, 20)
    rms_norm(x.numpy(), weight.numpy(), 1e-5, output.numpy())
    torch.testing.assert_close(output, torch.nn.functional.rms_norm(x, (20,), weight, 1e-5))
