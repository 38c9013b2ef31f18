"""Text is split at natural boundaries into passages of bounded length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.retrieval.ingestion.passages import file_passages
from runtime.retrieval.ingestion.sections import ParsedFile, Section, split


def words(text: str) -> int:
    return len(text.split())


def test_whole_paragraphs_are_combined_while_they_fit() -> None:
    text = "one two three\n\nfour five\n\nsix seven eight nine"
    assert list(split(text, 5, words)) == ["one two three\n\nfour five", "six seven eight nine"]


def test_long_paragraphs_are_split_at_sentences_and_long_sentences_at_words() -> None:
    text = "First sentence here. Second one. " + "word " * 12
    assert list(split(text, 5, words)) == [
        "First sentence here. Second one.", *["word word word word word"] * 2, "word word",
    ]  # fmt: skip


def test_an_endless_word_is_split_too() -> None:
    assert [len(piece) for piece in split("x" * 1000, 10, words)] == [125] * 8


@given(st.text(alphabet="ab .\n?", max_size=400), st.integers(1, 20))
def test_no_text_is_lost_and_no_passage_exceeds_the_limit(text: str, limit: int) -> None:
    pieces = list(split(text, limit, words))
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(piece == piece.strip() and 1 <= words(piece) <= limit for piece in pieces)


def test_sections_that_count_as_no_token_are_merged_in_pieces_of_bounded_length() -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return 0

    sections = [Section("\x01" * 100) for _ in range(1000)]
    assert list(file_passages(ParsedFile("", sections), "name", 192, count))
    assert max(counted) < 1000


def test_only_texts_of_about_the_size_of_a_passage_are_counted() -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return words(text)

    assert list(split("word " * 20_000, 10, count)) == ["word word word word word word word word word word"] * 2000
    assert max(counted) < 200


@pytest.mark.parametrize("cut", ["\n\n", "\n\n   \n\n"])
def test_a_cut_is_found_wherever_it_stands_in_a_long_text(cut: str) -> None:
    for shift in (-2, -1, 0, 1):
        before = "w" * (41 + shift) + " word" * 13_099  # 65,536 + shift characters
        pieces = list(split(f"{before}{cut}one two", 10, words))
        assert (len(pieces), pieces[-1]) == (1311, "one two")
    assert list(split(f"one two{' ' * 200_000}{cut}three", 2, words)) == ["one two", "three"]
