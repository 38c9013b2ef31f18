"""Tests of the ablation benchmark: the source contains every rule it changes; effects exceed the spread over seeds."""

import pytest

from benchmarks.ablation import ROOT, VARIANTS, Variant, effects


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_text_that_a_variant_replaces_occurs_once_in_the_source(variant: Variant) -> None:
    assert (ROOT / variant.file).read_text(encoding="utf-8").count(variant.old) == 1


def test_an_effect_is_the_mean_over_seeds_and_counts_if_it_exceeds_the_spread_by_a_twentieth() -> None:
    base = {"pool": [{"decode/s": 100.0, "misses": 0.1}, {"decode/s": 200.0, "misses": 0.2}]}
    found = {"pool": [{"decode/s": 80.0, "misses": 0.1}, {"decode/s": 170.0, "misses": 0.3}]}
    (slower,), (missed,) = effects(base, found, "decode/s"), effects(base, found, "misses")
    assert (slower.mean, slower.spread) == pytest.approx((-0.175, 0.025))
    assert slower.shows
    assert (missed.mean, missed.spread) == pytest.approx((0.05, 0.05))
    assert not missed.shows
