"""Stored answers: given for like questions of the same kind and the same tenant, for a while, and never beyond."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.node.config import AnswerCacheSection
from runtime.retrieval.embedding.embedder import TextKind
from runtime.retrieval.passages import Passage
from runtime.serving.frontend.answer_cache import MOST_CHARS, AnswerCache, Asked, Event, PromptAnswers
from runtime.serving.http.service import Settings
from runtime.serving.messages import Message, Retrieval, Retrieved, Sampling, Tokens
from tests.frontend.fakes import Cluster

GREEDY = Sampling(8)
ONE = (Tokens("a", "one", (1, 2), "stop", 3),)
EAST, NORTH = np.array([1.0, 0.0], np.float32), np.array([0.0, 2.0], np.float32)
NEAR_EAST = np.array([3.0, 0.3], np.float32)  # cosine .995


class Now:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Stand:
    """A cache under a clock that stands still, and its counts."""

    def __init__(self, **limits: Any) -> None:
        self.counts: Counter[Event] = Counter()
        self.now = Now()
        limits = {"threshold": 0.97, "ttl_s": 10.0, "entries": 3} | limits
        self.cache = AnswerCache(AnswerCacheSection(enabled=True, **limits), self._count, self.now)

    def _count(self, event: Event) -> None:
        self.counts[event] += 1


def key(tenant: str = "", prompt: Any = "why?", sampling: Sampling = GREEDY, **options: Any) -> Any:
    asked = Asked.of(
        tenant,
        options.get("model", "m"),
        prompt,
        sampling,
        options.get("retrieval"),
        seeded=options.get("seeded", False),
    )
    assert asked is not None
    return asked.key


def test_a_like_question_gets_the_stored_answer_and_an_unlike_one_does_not() -> None:
    stand = Stand()
    stand.cache.store(key(), EAST, ONE)
    stand.now.s += 4
    hit = stand.cache.find(key(), NEAR_EAST)
    assert hit is not None
    assert (hit.pieces, hit.age_s) == (ONE, 4.0)
    assert 0.99 < hit.similarity < 1
    assert stand.cache.find(key(), NORTH) is None
    assert stand.counts == {"stored": 1, "hit": 1, "miss": 1}


def test_of_several_the_most_similar_is_given() -> None:
    stand = Stand(threshold=0.5)
    two = (Tokens("b", "two", (3,), "stop", 3),)
    stand.cache.store(key(), EAST, ONE)
    stand.cache.store(key(), NORTH, two)
    hit = stand.cache.find(key(), np.array([0.2, 1.0], np.float32))
    assert hit is not None
    assert hit.pieces == two


@pytest.mark.parametrize(
    "other",
    [
        key(tenant="Bearer b"),
        key(model="n"),
        key(prompt=(Message("user", "why?"),)),
        key(prompt=(Message("system", "be brief"), Message("user", "why?"))),
        key(prompt="why 2?"),
        key(sampling=Sampling(9)),
        key(sampling=Sampling(8, temperature=0.5)),
        key(sampling=Sampling(8, top_p=0.5)),
        key(sampling=Sampling(8, stop=("x",))),
        key(sampling=Sampling(8, ignore_eos=True)),
        key(retrieval=Retrieval("docs")),
    ],
)
def test_whatever_else_differs_is_another_answer(other: Any) -> None:
    stand = Stand()
    stand.cache.store(key(), EAST, ONE)
    assert stand.cache.find(other, EAST) is None


def test_a_seed_matters_only_if_it_was_asked_for_and_if_tokens_are_drawn_at_random() -> None:
    warm = Sampling(8, temperature=0.7, seed=1)
    assert key(sampling=warm) == key(sampling=replace(warm, seed=2))
    assert key(sampling=warm, seeded=True) != key(sampling=replace(warm, seed=2), seeded=True)
    assert key(sampling=warm, seeded=True) != key(sampling=warm)
    assert key(sampling=GREEDY, seeded=True) == key(sampling=replace(GREEDY, seed=2), seeded=True)


@pytest.mark.parametrize(
    "prompt", [(1, 2, 3), "", " ", "x" * (MOST_CHARS + 1), (Message("user", "a"), Message("assistant", "b"))]
)
def test_what_an_embedder_cannot_judge_is_not_looked_up(prompt: Any) -> None:
    assert Asked.of("", "m", prompt, GREEDY, None, seeded=False) is None


def test_an_expired_answer_is_gone() -> None:
    stand = Stand()
    stand.cache.store(key(), EAST, ONE)
    stand.now.s += 9.9
    assert stand.cache.find(key(), EAST) is not None
    stand.now.s += 0.1
    assert stand.cache.find(key(), EAST) is None
    assert len(stand.cache) == 0
    assert stand.counts["expired"] == 1


def test_the_oldest_makes_room() -> None:
    stand = Stand(entries=2)
    for number in range(4):
        stand.cache.store(key(prompt=f"why {number}?"), EAST, ONE)
        stand.now.s += 1
    assert len(stand.cache) == 2
    assert stand.counts["evicted"] == 2
    found = [stand.cache.find(key(prompt=f"why {number}?"), EAST) is not None for number in range(4)]
    assert found == [False, False, True, True]


def test_the_same_question_is_stored_once_and_what_is_too_large_not_at_all() -> None:
    stand = Stand()
    stand.cache.store(key(), EAST, ONE)
    stand.cache.store(key(), NEAR_EAST, ONE)
    stand.cache.store(key(prompt="long?"), EAST, (Tokens("a", "x" * (1 << 17), (1,), "stop"),))
    stand.cache.store(key(prompt="many?"), EAST, (Retrieved("a", (Passage("p", "", 0.1, "x" * (1 << 17)),)), *ONE))
    assert stand.counts == {"stored": 1}


class Letters:
    """An embedder that sees which letters a text has."""

    name = "letters"
    dim = 26
    max_tokens = 1000
    at_once = 1

    def count_tokens(self, text: str) -> int:
        return len(text)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Any:
        return np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts], np.float32)


def cluster(**settings: Any) -> tuple[Cluster, Stand]:
    stand = Stand(ttl_s=1000.0)
    answers = PromptAnswers(stand.cache, Letters())
    return Cluster(settings=Settings(model="tiny", collections={"docs": 4}, **settings), answers=answers), stand


BODY = {"model": "tiny", "prompt": "what say=3 now", "max_tokens": 8, "temperature": 0}


def test_a_hit_is_the_stored_answer_and_says_so() -> None:
    started, stand = cluster()
    with started as node, node.http() as http:
        first = http.post("/v1/completions", json=BODY)
        assert "cached" not in first.json()
        second = http.post("/v1/completions", json=BODY | {"prompt": "now what say=3"})
        assert second.headers["x-trinity-cache"] == "hit"
        answer = second.json()
        assert answer["choices"] == first.json()["choices"]
        assert answer["usage"] == first.json()["usage"]
        assert answer["id"] != first.json()["id"]
        assert answer["cached"] == {"similarity": 1.0, "age_s": 0.0}
        assert len(node.players["prefill-0"].prefills) == 1, "the model was not asked again"
        assert stand.counts == {"miss": 1, "stored": 1, "hit": 1}


def test_a_streamed_answer_is_stored_and_given_as_a_stream() -> None:
    started, _ = cluster()
    with started as node:
        client = node.client()
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "what say=3 now"}],
            "temperature": 0,
        }
        retrieval = {"retrieval": {"collection": "docs", "k": 2}}
        texts = []
        for _ in range(2):
            chunks = list(
                client.chat.completions.create(
                    **body, stream=True, stream_options={"include_usage": True}, extra_body=retrieval
                )
            )
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
            assert chunks[-1].usage.completion_tokens == 3
            assert len(chunks[0].retrieval["passages"]) == 2
        assert texts[0] == texts[1] == "w0 w1 w2 "
        assert chunks[0].cached["similarity"] == 1.0
        assert len(node.players["prefill-0"].prefills) == 1


def test_tenants_never_see_each_others_answers() -> None:
    started, stand = cluster(api_keys=("a", "b"))
    with started as node, node.http() as http:
        for tenant in ("a", "b", "a"):
            answer = http.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {tenant}"})
            assert answer.status_code == 200
        assert stand.counts == {"miss": 2, "stored": 2, "hit": 1}
        assert len(node.players["prefill-0"].prefills) == 2


def test_a_request_may_do_without_and_an_answer_that_failed_is_not_stored() -> None:
    started, stand = cluster()
    with started as node, node.http() as http:
        http.post("/v1/completions", json=BODY | {"answer_cache": False})
        assert stand.counts == {}
        http.post("/v1/completions", json=BODY | {"prompt": "fail=2"})
        http.post("/v1/completions", json=BODY | {"prompt": "fail=2", "stream": True})
        assert stand.counts == {"miss": 2}
