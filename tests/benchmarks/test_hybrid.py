"""Ranks of two sides are fused, and BM25 asks for the words that tell passages apart."""

import numpy as np

from benchmarks.hybrid import by_words, common_words, fused, recall, words_index

PASSAGES = [{"title": f"t{n}", "text": text} for n, text in enumerate(["the cats purr", "the dog barks", "the birds"])]


def test_what_both_sides_find_comes_before_what_one_finds_first() -> None:
    words, vectors = np.array([[7, 3, 5]]), np.array([[2, 3, -1]])
    found = fused(words, vectors)
    assert found.tolist()[0][0] == 3
    assert set(found.tolist()[0]) == {3, 7, 2}
    assert (recall(found, [{3}], 1), recall(found, [{5}], 3)) == (1.0, 0.0)


def test_words_are_stemmed_and_common_ones_are_left_out_unless_there_are_no_others() -> None:
    index = words_index(PASSAGES, "porter unicode61")
    common = common_words(index, 2)
    assert common == {"the"}
    found, _ = by_words(index, ["The cat?", "the"], 3, common)
    assert found[0].tolist() == [0, -1, -1]
    assert sorted(found[1].tolist()) == [0, 1, 2]
    index.close()
