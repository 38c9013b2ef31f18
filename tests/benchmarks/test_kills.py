"""Tests of the kill benchmark: answers are right, cut, lost or wrong; the order of kills is fair and seeded."""

import random
from collections import Counter

import pytest

from benchmarks.faults.kills import Answer, Outcome, classify, order

KNOWN = Answer((1, 2, 3, 4, 5, 6), ((0, "a", ""), (0, "b", ""), (2, "c", ""), (4, "d", "")))


def outcome(found: Answer | None, error: str = "") -> Outcome:
    return Outcome(0, 10.0, 20.0, found, error)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (KNOWN, "right"),
        (Answer((1, 2, 3, 9, 5, 6), KNOWN.passages), "wrong"),
        (Answer(KNOWN.tokens[:5], KNOWN.passages), "wrong"),
        (Answer((*KNOWN.tokens, 6), KNOWN.passages), "twice"),
        (Answer(KNOWN.tokens, (*KNOWN.passages, (4, "e", ""))), "wrong"),
        (Answer((1, 2, 3, 4, 8, 9), KNOWN.passages[:3]), "right, without a probe's passages"),
        (Answer((1, 2, 3, 8, 8, 9), KNOWN.passages[:3]), "wrong"),
        (Answer((1, 2, 3, 4, 8), KNOWN.passages[:3]), "wrong"),
        (Answer((1, 2, 3, 4, 5, 6), KNOWN.passages[1:]), "wrong"),
        (Answer((1, 2), KNOWN.passages[:2], whole=False), "lost"),
    ],
)
def test_an_answer_is_compared_token_by_token_and_passage_by_passage(found: Answer, verdict: str) -> None:
    assert classify(KNOWN, outcome(found), []) == verdict


def test_an_answer_cut_without_a_frontends_death_is_lost() -> None:
    partial = Answer((1, 2), KNOWN.passages[:2], whole=False)
    for deaths, verdict in (([15.0], "cut"), ([9.0, 21.0], "lost")):
        assert classify(KNOWN, outcome(None, "connection"), deaths) == verdict
        assert classify(KNOWN, outcome(partial), deaths) == verdict
    assert classify(KNOWN, outcome(None, "unavailable"), [15.0]) == "lost"
    assert classify(KNOWN, outcome(Answer((1, 3), KNOWN.passages[:2], whole=False)), [15.0]) == "wrong"


def test_every_worker_is_killed_equally_often_in_a_seeded_order_and_sometimes_two_or_three_at_once() -> None:
    workers = [f"w-{number}" for number in range(10)]
    events = list(order(workers, 300, random.Random(1)))
    assert set(Counter(name for event in events for name in event).values()) == {30}
    assert {len(event) for event in events} == {1, 2, 3}
    assert all(len(set(event)) == len(event) for event in events)
    assert events == list(order(workers, 300, random.Random(1)))
    assert sum(len(event) for event in order(workers, 7, random.Random(2))) == 7
