"""Packed layers compute what the layers they replace compute."""

import pytest

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.model import packed_linear  # noqa: E402  (it imports torch)

SIZE = 512  # a layer of this size squared is large enough to be replaced


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 33, 200])
def test_a_packed_layer_equals_the_one_it_replaces_for_any_number_of_rows(rows: int, bias: bool) -> None:
    layer = torch.nn.Linear(SIZE, SIZE, bias=bias)
    network = torch.nn.Sequential(layer)
    packed_linear.pack_linears(network)
    assert isinstance(network[0], packed_linear.PackedLinear)
    x = torch.randn(1, rows, SIZE)
    with torch.inference_mode():
        torch.testing.assert_close(network(x), layer(x), rtol=1e-4, atol=1e-5)


def test_small_layers_stay_as_they_are() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE // 2))
    packed_linear.pack_linears(network)
    assert isinstance(network[0], torch.nn.Linear)


def test_layers_stay_as_they_are_where_the_product_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    network = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE))
    packed_linear.pack_linears(network)
    assert isinstance(network[0], torch.nn.Linear)


def test_layers_stay_as_they_are_where_the_product_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear.PackedLinear, "_product", lambda self, x: torch.zeros(*x.shape[:-1], 32))
    network = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE))
    packed_linear.pack_linears(network)
    assert isinstance(network[0], torch.nn.Linear)
