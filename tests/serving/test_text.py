"""Tests of streamed text: pieces add up to the answer, without partial characters or text after a stop string."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from runtime.serving.model.text import TextStream
from runtime.serving.model.tokenizer import Tokenizer


class Bytes(Tokenizer):
    """A tokenizer whose tokens are bytes."""

    def __init__(self) -> None:
        """It needs no files."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Words(Bytes):
    """A tokenizer whose decoder drops the space before a text's first token, as SentencePiece's does."""

    words = (" Hello", " there", ",", " wor", "ld", "!", "\n", " é")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[number] for number in ids).removeprefix(" ")


def pieces(stream: TextStream, groups: list[list[int]]) -> list[str]:
    return [*(stream.push(group) for group in groups), stream.flush()]


def test_a_character_is_emitted_with_its_last_byte() -> None:
    emitted = ["a", "", "é", "", "", "", "🙂", "b", ""]
    assert pieces(TextStream(Bytes()), [[byte] for byte in "aé🙂b".encode()]) == emitted


@given(groups=st.lists(st.binary(max_size=5)))
def test_pieces_add_up_to_the_text_of_any_bytes(groups: list[bytes]) -> None:
    emitted = pieces(TextStream(Bytes()), [list(group) for group in groups])
    assert "".join(emitted) == b"".join(groups).decode(errors="replace")


@given(text=st.text(), sizes=st.lists(st.integers(1, 4)))
def test_no_piece_of_a_valid_text_has_a_replacement_character(text: str, sizes: list[int]) -> None:
    data = list(text.replace("\ufffd", "").encode())
    groups = []
    for size in sizes:
        groups.append(data[:size])
        data = data[size:]
    assert not any("\ufffd" in piece for piece in pieces(TextStream(Bytes()), [*groups, data]))


@given(ids=st.lists(st.integers(0, len(Words.words) - 1)))
def test_spaces_between_words_survive_a_decoder_that_drops_the_first(ids: list[int]) -> None:
    assert "".join(pieces(TextStream(Words()), [[number] for number in ids])) == Words().decode(ids)


def test_text_before_a_stop_string_is_emitted_and_nothing_after_it() -> None:
    stream = TextStream(Bytes(), stop=["END"])
    emitted = [stream.push([byte]) for byte in b"ok ENTER END more"]
    assert emitted[:9] == ["o", "k", " ", "", "", "ENT", "", "ER", " "]
    assert not any(emitted[9:])
    assert stream.stopped
    assert stream.flush() == ""


def test_a_stop_string_in_the_held_bytes_counts_at_the_end_too() -> None:
    stream = TextStream(Bytes(), stop=["\ufffd"])
    assert stream.push([65, 0xE2]) == "A"
    assert stream.flush() == ""
    assert stream.stopped


@given(
    text=st.text(alphabet="abc", max_size=60),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_the_text_does_not_depend_on_the_grouping_of_tokens(text: str, stop: list[str], data: st.DataObject) -> None:
    stream, rest, emitted = TextStream(Bytes(), stop), list(text.encode()), ""
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        emitted += stream.push(rest[:size])
        rest = rest[size:]
    emitted += stream.flush()
    found = [(text.find(each) + len(each), text.find(each)) for each in stop if each in text]
    assert emitted == (text[: min(found)[1]] if found else text)
    assert stream.stopped == bool(found)
