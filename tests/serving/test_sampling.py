"""Tests of sampling: tokens follow the distribution of temperature and top_p, and a seed reproduces them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.serving.messages import Sampling
from runtime.serving.model.sampler import Sampler

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network.sampling import NO_TOKEN, sample  # noqa: E402  (needs torch)


def logits_of(probabilities: list[float]) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def draws(sampling: Sampling, logits: np.ndarray, count: int, drawn: int = 0) -> list[int]:
    sampler = Sampler(sampling, drawn)
    rows = torch.from_numpy(logits).expand(count, -1)
    tokens: list[int] = sample(rows, [sampler.next_spec() for _ in range(count)]).tolist()
    return tokens


def test_temperature_zero_takes_the_first_of_the_largest_logits() -> None:
    assert draws(Sampling(8, temperature=0.0, seed=1), np.array([0.0, 3.0, -1.0, 3.0], np.float32), 3) == [1, 1, 1]


def test_samples_follow_the_probabilities() -> None:
    wanted = [0.5, 0.25, 0.15, 0.1]
    counts = np.bincount(draws(Sampling(8, temperature=1.0, seed=3), logits_of(wanted), 20_000), minlength=4)
    assert counts / 20_000 == pytest.approx(wanted, abs=0.015)


@given(seed=st.integers(0, 2**32), top_p=st.floats(0.01, 0.999), size=st.integers(1, 3000), spread=st.floats(0.0, 8.0))
def test_the_nucleus_of_a_large_vocabulary_equals_that_of_a_full_sort(
    seed: int, top_p: float, size: int, spread: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    order = np.argsort(-logits, kind="stable")  # weights of different logits may be equal
    smallest = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1
    (token,) = draws(Sampling(8, temperature=1.0, top_p=top_p, seed=seed), logits, 1)
    assert token in order[: smallest + 1]  # one more for differences in rounding


def test_a_seed_reproduces_its_samples_and_another_does_not() -> None:
    logits = np.zeros(1000, np.float32)
    first = draws(Sampling(8, temperature=1.0, seed=11), logits, 20)
    assert first == draws(Sampling(8, temperature=1.0, seed=11), logits, 20)
    assert first != draws(Sampling(8, temperature=1.0, seed=12), logits, 20)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_worker_that_takes_over_samples_the_same_tokens(top_p: float) -> None:
    logits = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    sampling = Sampling(8, temperature=0.8, top_p=top_p, seed=-5)  # any integer is a seed
    assert draws(sampling, logits, 13, drawn=7) == draws(sampling, logits, 20)[7:]


@given(
    seed=st.integers(0, 2**32),
    steps=st.sampled_from([0.0, 0.25]),
    wanted=st.lists(
        st.tuples(st.sampled_from([0.0, 0.7, 1.5]), st.sampled_from([0.1, 0.9, 1.0])), min_size=1, max_size=5
    ),
)
def test_the_rows_of_a_batch_are_sampled_as_each_alone(
    seed: int, steps: float, wanted: list[tuple[float, float]]
) -> None:
    """Logits with few distinct values tie; the first counts."""
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal((len(wanted), 600)).astype(np.float32))
    if steps:
        logits = (logits / steps).round() * steps
    specs = [
        Sampler(Sampling(8, temperature=heat, top_p=top_p, seed=seed + i)).next_spec()
        for i, (heat, top_p) in enumerate(wanted)
    ]
    alone = [int(sample(row[None], [spec])) for row, spec in zip(logits, specs, strict=True)]
    assert sample(logits, specs).tolist() == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row", [[float("-inf")] * 300, [float("nan")] * 300, [0.0] * 299 + [float("nan")], [0.0] * 299 + [float("inf")]]
)
def test_a_row_whose_largest_logit_is_not_finite_gives_no_token_and_does_not_affect_its_neighbour(
    row: list[float], temperature: float
) -> None:
    specs = [Sampler(Sampling(8, temperature=temperature, top_p=0.9, seed=1)).next_spec() for _ in range(2)]
    missing, token = sample(torch.tensor([row, [0.0] * 300]), specs).tolist()
    assert missing == NO_TOKEN
    assert 0 <= token < 300
