"""Tests of the hybrid search benchmark: every mode and k, and hits of the marked passages."""

from collections.abc import Sequence

from benchmarks.hybrid import KS, WAYS, measure


def test_each_question_is_searched_in_every_mode_and_for_every_k() -> None:
    queries: list[tuple[str, int, float]] = []

    def ask(question: str, k: int, share: float) -> Sequence[str]:
        queries.append((question, k, share))
        return ["other", "right"][:k] if share else ["other"]

    questions = [{"question": "a", "positive": ["right"]}, {"question": "b", "positive": ["wrong"]}]
    found = measure(ask, questions)
    assert {way: [found[way][k][0] for k in KS] for way in WAYS} == {
        "vectors": [0.0, 0.0, 0.0], "hybrid": [0.0, 0.5, 0.5], "keywords first": [0.0, 0.5, 0.5],
    }  # fmt: skip
    assert len(queries) == len(set(queries)) == 2 * len(KS) * len(WAYS)
