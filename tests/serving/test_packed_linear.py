"""Tests that packed layers compute the same product as torch."""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network import linear  # noqa: E402  (it imports torch)
from runtime.serving.network.linear import (  # noqa: E402
    Int8Linear,
    PackedLinear,
    PlainLinear,
    int8_works,
    linear_layer,
    packing_works,
)

SIZE = 512  # a square layer of this size is large enough to be packed


@pytest.fixture(autouse=True)
def _reset_support_check() -> Iterator[None]:
    """Support for packing is detected once per process; here once per test."""
    for known in (linear.packing_works, linear.int8_works):
        known.cache_clear()
    yield
    for known in (linear.packing_works, linear.int8_works):
        known.cache_clear()


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


needs_int8 = pytest.mark.skipif(not int8_works(), reason="the processor's products of int8 are not exact")


@needs_int8
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_an_int8_layers_error_is_that_of_its_weights_despite_outliers_in_x(rows: int, bias: bool) -> None:
    weight, offset = torch.randn(SIZE, SIZE) / SIZE**0.5, torch.randn(SIZE) if bias else None
    layer, x = linear_layer(weight, offset, "int8"), torch.randn(rows, SIZE)
    assert isinstance(layer, Int8Linear)
    x[:, 5] = 90.0  # with x of 8 bits, all others would be -1, 0 and 1 steps
    steps = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / steps).round() * steps
    with torch.inference_mode():
        y = layer(x)
        expected = torch.nn.functional.linear(x, rounded, offset)
        each = torch.cat([layer(row[None]) for row in x])
    assert (y - expected).norm() < 1e-3 * expected.norm()
    assert torch.equal(each, y), "a row's products do not depend on its neighbours"


@needs_int8
def test_large_batches_of_an_int8_layer_are_multiplied_in_bfloat16() -> None:
    weight, x = torch.randn(SIZE, SIZE), torch.randn(17, SIZE)
    with torch.inference_mode():
        assert torch.equal(linear_layer(weight, None, "int8")(x), linear_layer(weight, None, "bfloat16")(x))


@needs_int8
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_non_finite_row_does_not_affect_other_rows(odd: float) -> None:
    weight, x = torch.randn(SIZE, SIZE), torch.randn(2, SIZE)
    x[0, 7] = odd
    with torch.inference_mode():
        y = linear_layer(weight, None, "int8")(x)
        assert not y[0].isfinite().any()
        assert torch.equal(y[1:], linear_layer(weight, None, "int8")(x[1:]))
        assert not linear_layer(weight, None, "int8")(torch.zeros(1, SIZE)).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_small_layers_are_not_packed(dtype: Any) -> None:
    small, x = torch.randn(SIZE // 2, SIZE), torch.randn(3, SIZE)
    layer = linear_layer(small, None, dtype)
    assert isinstance(layer, PlainLinear)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, small))


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize(("kind", "operators"), [(PackedLinear, "mkldnn"), (Int8Linear, "onednn")])
def test_layers_are_not_packed_with_products_that_are_missing_or_wrong(
    monkeypatch: pytest.MonkeyPatch, kind: Any, operators: str, wrong: bool
) -> None:
    if wrong:
        monkeypatch.setattr(kind, "_product", lambda self, x: torch.zeros(len(x), 32))
    else:
        monkeypatch.setattr(torch.ops, operators, object())
    layer = linear_layer(torch.randn(SIZE, SIZE), None, "int8" if kind is Int8Linear else "float32")
    packs = kind is Int8Linear and packing_works(torch.bfloat16)  # then for bfloat16
    assert isinstance(layer, PackedLinear if packs else PlainLinear)
