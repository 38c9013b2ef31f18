"""Tests of probe triggers: when an answer probes, and which passages it accepts."""

from math import log

import numpy as np
import pytest

from runtime.retrieval.passages import Passage
from runtime.serving.http.api_types import CompletionBody
from runtime.serving.messages import Retrieval
from runtime.serving.triggers import Trigger, entropy, trigger_of

SURE = np.array([9.0, 0.0, 0.0, 0.0], np.float32)
TORN = np.zeros(4, np.float32)


def trigger(kind: str, threshold: float = 0.0) -> Trigger:
    found = trigger_of(Retrieval("docs", every_tokens=4, trigger=kind, threshold=threshold))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_without_every_tokens_no_trigger_probes() -> None:
    assert trigger_of(Retrieval("docs", trigger="unsure", threshold=0.1)) is None


@pytest.mark.parametrize("kind", ["every", "drift"])
def test_the_token_trigger_probes_regardless_of_certainty(kind: str) -> None:
    probes = [n for n in range(1, 13) if trigger(kind, 0.5).should_probe(n, 0, SURE)]
    assert probes == [4, 8, 12]


def test_the_uncertainty_trigger_probes_only_uncertain_rows_at_intervals() -> None:
    unsure = trigger("unsure", 1.0)
    assert not any(unsure.should_probe(n, 0, SURE) for n in range(40))
    last_probe_at = 0
    places = []
    for n in range(1, 16):
        scores = SURE if n in (4, 5) else TORN
        if unsure.should_probe(n, last_probe_at, scores):
            places.append(last_probe_at := n)
    assert places == [6, 10, 14]
    assert not unsure.should_probe(9, 0, None), "without scores the model's certainty is unknown"


def test_a_drifting_answer_accepts_passages_only_if_none_in_use_is_near() -> None:
    drift = trigger("drift", 0.5)
    found = [Passage("new", "", 0.2), Passage("used", "", 0.5), Passage("other", "", 0.7)]
    assert not drift.accepts(found, {"used"})
    assert drift.accepts(found, {"other"}), "in use, but farther than the limit"
    assert drift.accepts(found, {"elsewhere"}), "in use, but not among the nearest"
    assert drift.accepts(found, set())
    assert trigger("every").accepts(found, {"used"})


def test_entropy_is_that_of_the_softmax_and_handles_impossible_tokens() -> None:
    assert entropy(TORN) == pytest.approx(log(4))
    assert entropy(SURE) < 0.01
    logits = np.array([1.0, 2.0, 0.5, -np.inf], np.float32)
    shares = np.exp(logits - 2.0) / np.exp(logits - 2.0).sum()
    assert entropy(logits) == pytest.approx(-sum(p * log(p) for p in shares if p > 0), rel=1e-5)
    assert entropy(logits + 1000) == pytest.approx(entropy(logits), rel=1e-3), "a shift of all logits changes nothing"


def test_each_trigger_has_a_default_threshold_and_a_request_may_set_another() -> None:
    def threshold(kind: str, **own: float) -> float:
        retrieval = {"every_tokens": 4, "probe_trigger": kind, **own}
        body = CompletionBody.model_validate({"model": "m", "prompt": "p", "retrieval": retrieval})
        found = body.to_retrieval("system")
        assert found is not None
        return found.threshold

    assert [threshold(kind) for kind in ("every", "drift", "unsure")] == [0.0, 0.5, 2.0]
    assert threshold("drift", probe_threshold=0.2) == 0.2
