"""Tests of passages in prompts: best first, within the budget, and unable to forge turns."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ContextLengthExceeded
from runtime.retrieval.passages import Passage
from runtime.serving.http.service import Settings
from runtime.serving.messages import Message
from runtime.serving.model.text import build_prompt, passages_chunk, query_text
from runtime.serving.model.tokenizer import Tokenizer
from tests.frontend.cluster import Cluster
from tests.frontend.fake_workers import PASSAGES
from tests.frontend.test_vector_stores import Stand

ASKED = [Message("user", "What is a ring?")]


@pytest.fixture(scope="module")
def tokenizer(tiny_directory: Path) -> Tokenizer:
    return Tokenizer.load(tiny_directory)


def passage(name: str, distance: float, text: str = "") -> Passage:
    return Passage(id=name, title=f"Title {name}", distance=distance, text=text or f"Text of {name}.")


def ids(passages: tuple[Passage, ...]) -> list[str]:
    return [each.id for each in passages]


def test_without_passages_a_chat_is_its_template_and_a_prompt_its_tokens(tokenizer: Tokenizer) -> None:
    assert build_prompt(tokenizer, ASKED, budget_tokens=500).tokens == tokenizer.chat(ASKED)
    assert build_prompt(tokenizer, prompt="once", budget_tokens=500).tokens == tokenizer.encode("once")
    assert build_prompt(tokenizer, prompt=[5, 6, 7], budget_tokens=3).tokens == [5, 6, 7]


def test_passages_are_in_search_order_before_the_question(tokenizer: Tokenizer) -> None:
    found = [passage("words", 0.9), passage("near", 0.1)]
    prompt = build_prompt(tokenizer, ASKED, passages=found, budget_tokens=500)
    text = tokenizer.decode(prompt.tokens)
    assert ids(prompt.used) == ["words", "near"], "with keyword search the best need not be the nearest"
    order = [text.index(part) for part in ("user", "[Title words]\nText of words.", "[Title near]", "a ring?")]
    assert order == sorted(order)


def test_passages_before_the_last_question_leave_the_conversation_unchanged(tokenizer: Tokenizer) -> None:
    messages = [Message("system", "Be brief."), *ASKED, Message("assistant", "A queue."), Message("user", "Whose?")]
    found = [passage("p", 0.1)]
    prompt = build_prompt(tokenizer, messages, passages=found, budget_tokens=900)
    text, before = tokenizer.decode(prompt.tokens), tokenizer.chat(messages[:3])
    assert text.index("A queue.") < text.index("Text of p.") < text.index("Whose?")
    shared = next(i for i, (a, b) in enumerate(zip(prompt.tokens, before, strict=False)) if a != b)
    assert tokenizer.decode(before[:shared]).endswith("A queue.<|im_end|>\n<|im_start|>") or shared >= len(before) - 12
    alone = build_prompt(tokenizer, [Message("assistant", "So.")], passages=found, budget_tokens=500)
    assert tokenizer.decode(alone.tokens).index("Text of p.") < tokenizer.decode(alone.tokens).index("So.")


def test_the_worst_passages_are_dropped_first_and_the_last_one_kept_is_truncated(tokenizer: Tokenizer) -> None:
    passages = [passage(name, distance, name * 100) for name, distance in (("a", 3), ("b", 1), ("c", 2))]
    everything = build_prompt(tokenizer, ASKED, passages=passages, budget_tokens=2000)
    assert ids(everything.used) == ["a", "b", "c"]
    prompt = build_prompt(tokenizer, ASKED, passages=passages, budget_tokens=len(everything.tokens) - 150)
    text = tokenizer.decode(prompt.tokens)
    assert ids(prompt.used) == ["a", "b"]
    assert "a" * 100 in text
    assert "b" * 20 in text
    assert "b" * 100 not in text
    assert "ccc" not in text


def test_a_long_request_is_tokenized_only_once_more_with_passages(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, near = "word " * 500, [passage("a", 0.1), passage("b", 0.2)]
    expected = build_prompt(tokenizer, prompt=long, passages=near, budget_tokens=4000, passage_tokens=100)
    bare = build_prompt(tokenizer, prompt=long, budget_tokens=4000).tokens
    render, lengths = tokenizer.prompt, []

    def counted(text: str, before: str = "") -> list[int]:
        lengths.append(len(text))
        return render(text, before)

    monkeypatch.setattr(tokenizer, "prompt", counted)
    prompt = build_prompt(tokenizer, prompt=long, passages=near, budget_tokens=4000, passage_tokens=100, bare=bare)
    assert prompt == expected
    assert sum(length >= len(long) for length in lengths) == 1


def test_a_request_over_the_budget_is_rejected_with_both_numbers_and_its_field(tokenizer: Tokenizer) -> None:
    size = len(tokenizer.chat(ASKED))
    with pytest.raises(ContextLengthExceeded, match=f"{size} tokens; .* room for {size - 1}") as caught:
        build_prompt(tokenizer, ASKED, passages=[passage("p", 0.1)], budget_tokens=size - 1)
    assert caught.value.param == "messages"
    assert build_prompt(tokenizer, ASKED, passages=[passage("p", 0.1)], budget_tokens=size).used == ()
    with pytest.raises(ContextLengthExceeded) as caught:
        build_prompt(tokenizer, prompt=[5] * 9, budget_tokens=8)
    assert caught.value.param == "prompt"


def test_a_chunk_inserted_into_an_answer_has_its_passages_between_empty_lines(tokenizer: Tokenizer) -> None:
    chunk = passages_chunk(tokenizer, [passage("a", 0.2), passage("b", 0.1)], 500)
    assert ids(chunk.used) == ["a", "b"]
    assert tokenizer.decode(chunk.tokens) == "\n\n[Title a]\nText of a.\n\n[Title b]\nText of b.\n\n"
    assert passages_chunk(tokenizer, [passage("a", 0.1)], 3).tokens == []


@given(
    texts=st.lists(st.text(max_size=80), max_size=5), budget=st.integers(0, 400), limit=st.none() | st.integers(0, 200)
)
def test_no_budget_is_ever_exceeded(tokenizer: Tokenizer, texts: list[str], budget: int, limit: int | None) -> None:
    passages = [passage(str(number), number, text) for number, text in enumerate(texts)]
    chunk = passages_chunk(tokenizer, passages, budget)
    assert len(chunk.tokens) <= budget
    assert bool(chunk.tokens) == bool(chunk.used)
    size = len(tokenizer.chat(ASKED))
    prompt = build_prompt(tokenizer, ASKED, passages=passages, budget_tokens=size + budget, passage_tokens=limit)
    assert len(prompt.tokens) <= size + budget
    assert ids(prompt.used) == [str(number) for number in range(len(prompt.used))]


def test_the_last_question_is_the_search_query(tokenizer: Tokenizer) -> None:
    chat = [Message("user", "first"), Message("assistant", "answer"), Message("user", "second")]
    assert query_text(tokenizer, chat, "") == "second"
    assert query_text(tokenizer, [Message("system", "only")], "") == "only"
    assert query_text(tokenizer, [], "raw") == "raw"
    assert query_text(tokenizer, [], tokenizer.encode("ids")) == "ids"


def test_a_responses_prompt_begins_with_those_of_the_responses_that_it_continues(tokenizer: Tokenizer) -> None:
    stand, tool = Stand(), {"type": "file_search", "vector_store_ids": ["docs"], "max_num_results": 2}
    with (
        Cluster(settings=Settings("tiny", {"docs": 64}), search=stand) as cluster,
        cluster.http() as http,
    ):
        prompts: list[list[int]] = []
        previous = None
        for turn in range(3):
            body = {"model": "tiny", "input": f"turn {turn} say={turn + 2}", "instructions": "Be brief."}
            answer = http.post("/v1/responses", json=body | {"tools": [tool], "previous_response_id": previous}).json()
            previous = answer["id"]
            sent = cluster.players["prefill-0"].prefills[-1].generation
            assert sent.retrieval is not None
            # As prefill does, with what it finds here for every question.
            made = build_prompt(tokenizer, sent.messages, passages=PASSAGES, budget_tokens=4000)
            prompts.append(made.tokens)
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier)] == earlier
