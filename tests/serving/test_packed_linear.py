"""Tests that packed layers compute the same product as torch."""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network.linear import (  # noqa: E402  (it imports torch)
    PackedLinear,
    PlainLinear,
    linear_layer,
    packing_works,
)

SIZE = 512  # a square layer of this size is large enough to be packed


@pytest.fixture(autouse=True)
def _reset_support_check() -> Iterator[None]:
    """Support for packing is detected once per process; here once per test."""
    packing_works.cache_clear()
    yield
    packing_works.cache_clear()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 33, 200])
def test_a_packed_layer_equals_the_plain_product_for_any_number_of_rows(rows: int, bias: bool) -> None:
    weight, offset = torch.randn(SIZE, SIZE) / SIZE**0.5, torch.randn(SIZE) if bias else None
    layer = linear_layer(weight, offset)
    assert isinstance(layer, PackedLinear)
    x = torch.randn(rows, SIZE)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, offset), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16, 200])
def test_a_bfloat16_layer_accepts_both_types_and_multiplies_rounded_values(
    rows: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr(torch.ops, "mkldnn", object())
    weight, offset, x = torch.randn(SIZE, SIZE) / SIZE**0.5, torch.randn(SIZE), torch.randn(rows, SIZE)
    rounded = [part.bfloat16().float() for part in (x, weight, offset)]
    layer = linear_layer(weight, offset, "bfloat16")
    assert isinstance(layer, PackedLinear) == (
        packed and packing_works(torch.bfloat16)
    )  # else without its instructions
    with torch.inference_mode():
        y, expected = layer(x), torch.nn.functional.linear(*rounded)
        assert torch.equal(layer(x.bfloat16()), y)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=2**-6)
    assert not torch.allclose(y.float(), torch.nn.functional.linear(x, weight, offset), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_layers_are_not_packed(dtype: Any) -> None:
    small, x = torch.randn(SIZE // 2, SIZE), torch.randn(3, SIZE)
    layer = linear_layer(small, None, dtype)
    assert isinstance(layer, PlainLinear)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, small))


def test_layers_are_not_packed_if_the_product_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert isinstance(linear_layer(torch.randn(SIZE, SIZE), None), PlainLinear)


def test_layers_are_not_packed_if_the_product_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "_product", lambda self, x: torch.zeros(*x.shape[:-1], 32))
    assert isinstance(linear_layer(torch.randn(SIZE, SIZE), None), PlainLinear)
