"""An OpenAI server as the engine: what is asked of it, what is told of its answers, how answers go on."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runtime.engines.openai.assembly import plain
from runtime.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    EngineUnreachable,
    InvalidRequest,
    Overloaded,
    TrinityError,
    WorkerLost,
)
from runtime.serving.frontend.requests import Relayed, Request
from runtime.serving.frontend.starts import RestartLimits
from runtime.serving.messages import Retrieval
from tests.engines.fake_openai import MODEL, Behaviour, rendered, written
from tests.engines.openai_engines import sequence, stand, until, whole
from tests.frontend.fakes import run

DOCS = Retrieval("docs", 2)
PROBES = Retrieval("docs", 1, every_tokens=8)
CHAT = [{"role": "user", "content": "What is a decorator?"}]
KINDS = {
    "tokens": Behaviour(),
    "chat": Behaviour(token_ids=False, goes_on=True),
    "text": Behaviour(token_ids=False, renders=True),
}


def test_an_answer_is_the_servers_with_its_usage_and_finish_reason() -> None:
    async def test() -> None:
        async with stand() as at:
            told = await whole(at.chat(max_tokens=20))
            expected = written(list(rendered(CHAT).encode()), 20)
            assert told.ids == expected
            assert told.text == bytes(expected).decode()
            assert isinstance(told.last, Relayed)
            assert told.last.finish_reason == "length"
            assert told.last.usage == {"prompt_tokens": 29, "completion_tokens": 20, "total_tokens": 49}
            assert [ended.code for ended in at.ended] == ["length"]
            assert {"received", "first_token", "end"} <= set(at.ended[0].stages)

    run(test())


def test_the_body_goes_on_as_it_came_but_for_stream_and_usage() -> None:
    async def test() -> None:
        async with stand(Behaviour(token_ids=False)) as at:
            extra: dict[str, Any] = {
                "temperature": 0.3,
                "chat_template_kwargs": {"enable_thinking": False},
                "top_k": 5,
                "user": "me",
            }
            await whole(at.chat(max_completion_tokens=4, **extra))
            (body,) = at.fake.generations()
            assert body == extra | {
                "model": MODEL,
                "messages": CHAT,
                "max_completion_tokens": 4,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            assert at.fake.headers[-1]["x-request-id"] == "request-0"

    run(test())


def test_passages_stand_in_the_system_turn_and_are_told_before_the_first_token() -> None:
    async def test() -> None:
        async with stand() as at:
            system = {"role": "system", "content": "Be brief."}
            request = at.chat(retrieval=DOCS, messages=[system, *CHAT], max_tokens=4)
            told = await whole(request)
            assert [passage.id for passage in told.searches[0].passages] == ["p1.0", "p1.1"]
            assert told.pieces[0] is told.searches[0]
            assert at.library.calls[0]["query"] == "What is a decorator?"
            assert at.library.calls[0].get("stage", "prefill") == "prefill"
            assert 59 < at.library.calls[0]["timeout_s"] <= 60  # the request's own deadline
            (body,) = at.fake.generations()
            first, *rest = body["messages"]
            assert first["content"].startswith("Be brief.\n\n")
            assert "[T1.0]\npassage 1.0.\n\n[T1.1]\npassage 1.1." in first["content"]
            assert rest == CHAT
            assert set(at.ended[0].stages) >= {"embedded", "searched", "prefill_begin"}

    run(test())


def test_passages_stand_before_a_prompt_that_is_text() -> None:
    async def test() -> None:
        async with stand() as at:
            await whole(at.complete("def f(", retrieval=DOCS, max_tokens=4))
            (body,) = at.fake.generations()
            assert body["prompt"].endswith("passage 1.1.\n\ndef f(")

    run(test())


@pytest.mark.parametrize("kind", ["tokens", "chat", "text"])
def test_a_probe_stops_the_answer_and_goes_on_behind_the_new_passages(kind: str) -> None:
    async def test() -> None:
        async with stand(KINDS[kind]) as at:
            told = await whole(at.chat(retrieval=PROBES, max_tokens=24))
            assert [search.at_token for search in told.searches] == [0, 8, 16]
            assert [call.get("stage") for call in at.library.calls[1:]] == ["decode", "decode"]
            assert told.text[:8] in at.library.calls[1]["query"]
            first, second, third = at.fake.generations()
            assert [body["max_tokens"] for body in (first, second, third)] == [8, 8, 8]
            block = "\n\n[T2.0]\npassage 2.0.\n\n"
            if kind == "chat":
                assert second["messages"][:-1] == first["messages"]
                assert second["messages"][-1] == {"role": "assistant", "content": told.text[:8] + block}
                assert second["continue_final_message"] is True
                before = rendered(second["messages"], goes_on=True)
            else:
                before = rendered(first["messages"]) + told.text[:8] + block
                sent = second["prompt"]
                assert (bytes(sent).decode() if kind == "tokens" else sent) == before
            assert told.text[8:16] == bytes(written(list(before.encode()), 8)).decode()
            assert isinstance(told.last, Relayed)
            assert told.last.usage is not None
            assert told.last.usage["completion_tokens"] == told.last.completion_tokens == 24
            assert len([probe for piece in told.pieces for probe in getattr(piece, "probes", ())]) == 2

    run(test())


def test_by_token_ids_an_answer_with_two_probes_equals_fresh_runs_over_the_same_tokens() -> None:
    async def test() -> None:
        async with stand() as at:
            for number in range(20):
                question = f"question {number}"
                told = await whole(at.chat(question, retrieval=PROBES, max_tokens=24))
                prompt = list(rendered(at.fake.generations()[-3]["messages"]).encode())
                stretches = sequence(prompt, told)
                assert [len(wrote) for _, wrote in stretches] == [8, 8, 8]
                assert all(wrote == written(before, len(wrote)) for before, wrote in stretches)

    run(test())


def test_a_probe_that_brings_nothing_new_leaves_the_answer_as_it_is_without_probes() -> None:
    async def test() -> None:
        async with stand() as at:
            alone = await whole(at.chat(max_tokens=24))
            at.library.error = Overloaded("the pool is full")
            request = at.chat(max_tokens=24)
            assert (await whole(request)).ids == alone.ids
            at.library.error = None
            first = at.chat(retrieval=PROBES, max_tokens=24)
            await until(lambda: at.library.calls)
            at.library.error = Overloaded("the pool is full")
            told = await whole(first)
            (before, wrote), *more = sequence(list(rendered(at.fake.generations()[-3]["messages"]).encode()), told)
            assert not more
            assert wrote == written(before, 24)
            probes = [probe for piece in told.pieces for probe in getattr(piece, "probes", ())]
            assert [probe.outcome for probe in probes] == ["failed", "failed"]

    run(test())


def test_in_mode_prefetch_the_answer_goes_on_until_the_passages_are_there() -> None:
    async def test() -> None:
        async with stand() as at:
            retrieval = Retrieval("docs", 1, every_tokens=8, probe_mode="prefetch")
            told = await whole(at.chat(retrieval=retrieval, max_tokens=64))
            places = [search.at_token for search in told.searches]
            assert places[0] == 0
            assert len(places) > 2
            assert all(place > 8 for place in places[1:])  # it went on meanwhile
            prompt = list(rendered(at.fake.generations()[0]["messages"]).encode())
            assert all(wrote == written(before, len(wrote)) for before, wrote in sequence(prompt, told))
            assert len(told.ids) == 64
            assert at.fake.open == 0

    run(test())


def test_no_request_goes_on_from_within_a_character() -> None:
    async def test() -> None:
        async with stand(Behaviour(letters="äöüéèß")) as at:  # two bytes each, drawn at random: halves of all kinds
            told = await whole(at.chat(retrieval=PROBES, max_tokens=40))
            assert len(at.fake.generations()) >= 4
            prompt = list(rendered(at.fake.generations()[0]["messages"]).encode())
            for before, wrote in sequence(prompt, told)[:-1]:
                assert bytes([*before[-1:], *wrote]), wrote
            for search in told.searches[1:]:
                assert search.at_token <= len(told.ids)

    run(test())


@pytest.mark.parametrize("kind", ["tokens", "chat", "text"])
def test_a_stop_string_across_a_probe_ends_the_answer(kind: str) -> None:
    async def test() -> None:
        async with stand(KINDS[kind]) as at:
            at.library.error = None
            plain = (await whole(at.chat(retrieval=PROBES, max_tokens=24))).text
        async with stand(KINDS[kind]) as at:
            stop = plain[6:10]
            told = await whole(at.chat(retrieval=PROBES, max_tokens=24, stop=[stop]))
            assert told.text == plain[: plain.index(stop)]
            assert told.last.finish_reason == "stop"
            assert all("stop" not in body for body in at.fake.generations())
            assert at.fake.open == 0

    run(test())


def test_the_models_own_end_ends_an_answer_with_probes() -> None:
    async def test() -> None:
        async with stand(Behaviour(ends=11)) as at:
            at.library.error = None
            told = await whole(at.complete("<a>", retrieval=Retrieval("docs", 1, every_tokens=8), max_tokens=24))
            assert told.last.finish_reason == "stop"

    run(test())


def test_every_choice_of_n_is_told_and_ends() -> None:
    async def test() -> None:
        async with stand() as at:
            told = await whole(at.chat(n=3, max_tokens=5))
            texts = {0: "", 1: "", 2: ""}
            reasons = {}
            for piece in told.pieces:
                assert isinstance(piece, Relayed)
                for choice in piece.choices:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                    if choice["finish_reason"]:
                        reasons[choice["index"]] = choice["finish_reason"]
            assert all(len(text) == 5 for text in texts.values())
            assert len(set(texts.values())) == 3
            assert reasons == {0: "length", 1: "length", 2: "length"}

    run(test())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retrieval", [None, PROBES], ids=["plain", "probes"])
def test_a_server_that_writes_on_behind_max_tokens_is_cut_there_and_left(
    kind: str, retrieval: Retrieval | None
) -> None:
    async def test() -> None:
        async with stand(replace(KINDS[kind], endless=True)) as at, stand(KINDS[kind]) as heeding:
            chunks: list[int] = []
            at.fake.on_chunk = chunks.append
            expected = await whole(heeding.chat(retrieval=retrieval, max_tokens=20))
            told = await whole(at.chat(retrieval=retrieval, max_tokens=20))
            assert (told.text, told.ids) == (expected.text, expected.ids)
            assert told.last.finish_reason == "length"
            assert at.fake.open == 0
            assert max(chunks) < 30, "its stream is not read to the end"
            assert [(ended.code, ended.completion_tokens) for ended in at.ended] == [("length", 20)]

    run(test())


def test_every_choice_is_cut_at_its_own_end_and_thoughts_count() -> None:
    async def test() -> None:
        async with stand(Behaviour(token_ids=False)) as at:
            deltas = [(0, "content"), (1, "reasoning_content"), (1, "content"), (1, "content"), (0, "content")] * 5
            at.fake.says = [{"choices": [{"index": index, "delta": {name: "x"}}]} for index, name in deltas]
            told = await whole(at.chat(n=2, max_tokens=3))
            pieces = [choice for piece in told.pieces if isinstance(piece, Relayed) for choice in piece.choices]
            for index, texts in ((0, 3), (1, 2)):
                choices = [choice for choice in pieces if choice["index"] == index]
                assert [choice["delta"].get("content") for choice in choices].count("x") == texts
                assert [choice.get("finish_reason") for choice in choices if choice.get("finish_reason")] == ["length"]
            assert at.fake.open == 0

    run(test())


def test_an_answer_without_a_limit_is_cut_at_the_context() -> None:
    async def test() -> None:
        async with stand(Behaviour(endless=True, context=300)) as at:
            assert len((await whole(at.chat())).ids) == 300

    run(test())


def test_a_deadline_says_how_many_tokens_were_told_also_where_the_server_tells_none() -> None:
    async def test() -> None:
        async with stand(Behaviour(token_ids=False, hangs_after=6)) as at:
            request = at.chat(max_tokens=20)
            for _ in range(5):
                await request.next()
            at.clock.forward(61)
            at.engine.tick()
            assert (await _refusal(request)).message == "the request's deadline passed after 5 tokens"
            assert [ended.completion_tokens for ended in at.ended] == [5]

    run(test())


def test_a_server_that_stops_while_nobody_asks_it_is_missing_within_five_seconds() -> None:
    async def test() -> None:
        async with stand() as at:
            await whole(at.chat(max_tokens=4))
            at.fake.behaviour.down = True
            at.engine.tick()
            assert at.engine.missing() == []
            at.clock.forward(5)
            at.engine.tick()
            await until(at.engine.missing)
            at.fake.behaviour.down = False
            at.engine.tick()
            await until(lambda: not at.engine.missing())

    run(test())


def test_a_quiet_server_that_answers_with_an_error_stays_and_a_busy_one_is_not_asked() -> None:
    async def test() -> None:
        async with stand() as at:
            at.fake.behaviour.key = "another"
            at.clock.forward(5)
            await asyncio.gather(*at.engine.servers.quiet())
            assert at.engine.missing() == []
            assert at.engine.servers.quiet() == [], "it was asked just now"
            at.fake.behaviour = Behaviour(hangs_after=2)
            request = at.chat(max_tokens=4)
            await request.next()
            at.clock.forward(5)
            assert at.engine.servers.quiet() == []

    run(test())


REFUSED_WITH_PROBES = [
    {"n": 2},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"logprobs": True},
    {"presence_penalty": 0.5},
    {"continue_final_message": True},
]


@pytest.mark.parametrize("extra", REFUSED_WITH_PROBES, ids=lambda extra: next(iter(extra)))
def test_what_cannot_be_combined_with_probes_is_refused_by_name(extra: dict[str, Any]) -> None:
    async def test() -> None:
        async with stand() as at:
            with pytest.raises(InvalidRequest) as caught:
                at.chat(retrieval=PROBES, **extra)
            assert caught.value.param == next(iter(extra))
            assert not at.fake.asked
            await whole(at.chat(retrieval=DOCS, **extra))  # but retrieval alone can

    run(test())


async def _refusal(request: Request) -> TrinityError:
    with pytest.raises(TrinityError) as caught:
        await whole(request)
    return caught.value


def test_a_server_that_gives_fewer_choices_than_asked_for_is_told_of() -> None:
    async def test() -> None:
        async with stand(Behaviour(choices=False)) as at:
            error = await _refusal(at.chat(n=2, max_tokens=3))
            assert (error.status, error.param) == (400, "n")

    run(test())


def test_a_server_that_leaves_logprobs_out_is_told_of() -> None:
    async def test() -> None:
        async with stand(Behaviour(logprobs=False)) as at:
            error = await _refusal(at.chat(logprobs=True, max_tokens=3))
            assert (error.status, error.param) == (400, "logprobs")

    run(test())


def test_what_a_server_cannot_do_is_refused_before_it_is_asked() -> None:
    async def test() -> None:
        plain = Behaviour(token_ids=False, usage=False, completions=False)
        async with stand(plain) as at:
            refused: dict[str, Callable[[], Request]] = {
                "retrieval.every_tokens": lambda: at.chat(retrieval=PROBES),
                "return_token_ids": lambda: at.chat(return_token_ids=True),
                "stream_options": lambda: at.chat(stream=True, stream_options={"include_usage": True}),
                "prompt": lambda: at.complete("abc"),
            }
            for param, ask in refused.items():
                with pytest.raises(InvalidRequest) as caught:
                    ask()
                assert caught.value.param == param
            assert not at.fake.asked
            assert not at.ended
            with pytest.raises(InvalidRequest, match="text to search"):
                at.chat("", retrieval=DOCS)

    run(test())


def test_a_servers_refusal_is_the_clients_with_its_status_and_words() -> None:
    async def test() -> None:
        async with stand() as at:
            said = {"error": {"message": "top_k must be positive", "param": "top_k", "code": None}}
            at.fake.behaviour.refuses = (422, said)
            error = await _refusal(at.chat(top_k=-7))
            assert isinstance(error, InvalidRequest)
            assert (error.status, error.message, error.param) == (422, "top_k must be positive", "top_k")
            assert len(at.fake.asked) == 1  # it is the request that is wrong: no other try
            at.fake.behaviour.refuses = None
            error = await _refusal(at.chat(max_tokens=100_000))
            assert isinstance(error, ContextLengthExceeded)

    run(test())


@pytest.mark.parametrize(("status", "kind"), [(500, EngineFailed), (401, EngineFailed), (429, Overloaded)])
def test_a_servers_own_errors_are_typed(status: int, kind: type[TrinityError]) -> None:
    async def test() -> None:
        async with stand(restarts=RestartLimits(0, 0)) as at:
            at.fake.behaviour.refuses = (status, {"error": {"message": "no"}})
            error = await _refusal(at.chat())
            assert type(error) in (kind, *kind.__subclasses__())
            assert [ended.code for ended in at.ended] == [error.code]

    run(test())


def test_a_server_that_is_down_costs_no_request_while_another_is_up() -> None:
    async def test() -> None:
        async with stand(Behaviour(), Behaviour()) as at:
            at.fakes[0].behaviour.down = True
            told = [await whole(at.chat(f"question {number}", max_tokens=4)) for number in range(4)]
            assert all(len(one.ids) == 4 for one in told)
            assert not at.fakes[0].asked
            assert [ended.code for ended in at.ended] == ["length"] * 4

    run(test())


def test_without_any_server_a_request_is_refused_and_the_engine_is_missing_until_one_answers() -> None:
    async def test() -> None:
        async with stand(Behaviour(down=True)) as at:
            assert at.engine.missing() == ["engine"]
            with pytest.raises(EngineUnreachable, match="connection refused"):
                at.chat()
            at.fake.behaviour.down = False
            at.clock.forward(60)
            at.engine.tick()
            await until(lambda: not at.engine.missing())
            assert len((await whole(at.chat(max_tokens=3))).ids) == 3

    run(test())


def test_a_request_waits_for_a_server_as_long_as_it_may() -> None:
    async def test() -> None:
        async with stand(Behaviour(down=True), restarts=RestartLimits(3, 60_000_000_000)) as at:
            request = at.chat(max_tokens=3)
            at.fake.behaviour.down = False
            at.clock.forward(30)
            at.engine.tick()
            assert len((await whole(request)).ids) == 3

    run(test())


def test_the_load_is_shared_by_requests_in_flight() -> None:
    async def test() -> None:
        async with stand(Behaviour(hangs_after=3), Behaviour(hangs_after=3)) as at:
            requests = [at.chat(f"question {number}") for number in range(6)]
            await until(lambda: [fake.open for fake in at.fakes] == [3, 3])
            at.engine.cancel(requests[0])
            at.engine.cancel(requests[2])
            await until(lambda: sum(fake.open for fake in at.fakes) == 4)
            at.chat("another")
            await until(lambda: sum(fake.open for fake in at.fakes) == 5)
            assert sorted(fake.open for fake in at.fakes) == [2, 3]

    run(test())


@pytest.mark.parametrize("kind", ["tokens", "chat", "text"])
@pytest.mark.parametrize("chunks", [1, 2, 7, 19])
def test_an_answer_whose_server_is_lost_goes_on_elsewhere_with_no_token_twice(kind: str, chunks: int) -> None:
    async def test() -> None:
        how = KINDS[kind]
        async with stand(how) as at:
            expected = await whole(at.chat(max_tokens=20))
        breaking = replace(how, breaks_after=chunks)
        async with stand(breaking, how) as at:
            first, second = at.chat(max_tokens=20), at.chat(max_tokens=20)
            told = [await whole(first), await whole(second)]
            assert [one.text for one in told] == [expected.text] * 2
            assert all(isinstance(one.last, Relayed) and one.last.completion_tokens == 20 for one in told)
            assert at.engine.statistics().restarts == 1
            assert [ended.code for ended in at.ended] == ["length"] * 2

    run(test())


def test_an_answer_that_cannot_go_on_elsewhere_ends_with_one_error() -> None:
    async def test() -> None:
        async with stand(Behaviour(breaks_after=5), Behaviour(breaks_after=5)) as at:
            error = await _refusal(at.chat(n=2, max_tokens=9))
            assert isinstance(error, WorkerLost)
            assert "broke off" in error.message
            assert [ended.code for ended in at.ended] == ["worker_lost"]

    run(test())


def test_new_tries_are_bounded() -> None:
    async def test() -> None:
        async with stand(*[Behaviour(breaks_after=1) for _ in range(6)]) as at:
            error = await _refusal(at.chat(max_tokens=9))
            assert isinstance(error, EngineFailed)
            assert sum(len(fake.generations()) for fake in at.fakes) == 4  # once, and three times more

    run(test())


def test_cancelling_closes_the_servers_stream_and_ends_the_request_once() -> None:
    async def test() -> None:
        async with stand(Behaviour(hangs_after=4)) as at:
            request = at.chat(max_tokens=20)
            await request.next()
            assert at.fake.open == 1
            at.engine.cancel(request)
            at.engine.cancel(request)
            await until(lambda: at.fake.open == 0)
            assert [ended.code for ended in at.ended] == ["client_closed_request"]
            assert at.engine.servers.members[0].in_flight == 0

    run(test())


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    async def test() -> None:
        async with stand(Behaviour(hangs_after=4)) as at:
            at.library.hangs = True
            searching, writing = at.chat(retrieval=DOCS), at.chat(max_tokens=20)
            await writing.next()
            at.clock.forward(61)
            at.engine.tick()
            for request in (searching, writing):
                error = await _refusal(request)
                assert isinstance(error, DeadlineExceeded)
            await until(lambda: at.fake.open == 0)

    run(test())


def test_the_end_of_a_drain_ends_what_is_in_flight() -> None:
    async def test() -> None:
        async with stand(Behaviour(hangs_after=4)) as at:
            requests = [at.chat(f"question {number}") for number in range(3)]
            at.engine.end_all(WorkerLost("the node has stopped"))
            for request in requests:
                assert isinstance(await _refusal(request), WorkerLost)
            assert at.engine.statistics().in_flight == 0

    run(test())


def test_requests_in_flight_are_bounded() -> None:
    async def test() -> None:
        async with stand(Behaviour(hangs_after=1), max_in_flight=2) as at:
            for _ in range(2):
                at.chat()
            with pytest.raises(Overloaded, match="the limit is 2"):
                at.chat()

    run(test())


def test_a_document_cannot_end_a_turn_of_the_chat() -> None:
    assert plain("a<|im_end|>b</s>c<|im_<|x|>end|>[/INST]<end_of_turn>d") == "abcd"
    assert plain("x < y | z > w") == "x < y | z > w"


def test_what_is_cut_short_of_a_stream_is_no_whole_answer() -> None:
    async def test() -> None:
        async with stand(Behaviour(finish=False), restarts=RestartLimits(0, 0)) as at:
            error = await _refusal(at.chat(max_tokens=5))
            assert "finish_reason" in error.message

    run(test())


def test_asking_many_at_once_ends_each_once() -> None:
    async def test() -> None:
        async with stand(Behaviour(breaks_after=6), Behaviour()) as at:
            asked = [at.chat(f"question {number}", retrieval=PROBES, max_tokens=24) for number in range(30)]
            told = await asyncio.gather(*(whole(request) for request in asked))
            assert all(len(one.ids) == 24 for one in told)
            assert len(at.ended) == 30
            assert at.engine.statistics().in_flight == 0
            assert [member.in_flight for member in at.engine.servers.members] == [0, 0]

    run(test())


def test_passages_that_have_no_room_are_left_out_of_a_request_until_it_fits() -> None:
    async def test() -> None:
        async with stand(Behaviour(context=200, token_ids=False)) as at:
            at.library.long = 300  # bytes, and as many tokens here, four times what is taken for granted
            told = await whole(at.chat(retrieval=Retrieval("docs", 1), max_tokens=8))
            assert len(told.text) == 8
            sizes = [len(rendered(body["messages"])) for body in at.fake.generations()]
            assert sizes == sorted(sizes, reverse=True)
            assert len(sizes) > 1
            assert told.searches == [told.pieces[0]]  # what is in the request that was accepted

    run(test())


@pytest.mark.parametrize("kind", ["tokens", "chat"])
def test_a_probe_that_would_fill_the_context_costs_the_answer_no_token(kind: str) -> None:
    async def test() -> None:
        async with stand(replace(KINDS[kind], context=110)) as at:
            at.library.long = 300
            told = await whole(at.chat(retrieval=PROBES, max_tokens=24))
            assert len(told.text) == 24
            assert isinstance(told.last, Relayed)
            assert told.last.completion_tokens == 24

    run(test())


def test_by_token_ids_a_probe_brings_no_more_tokens_than_it_may() -> None:
    async def test() -> None:
        async with stand() as at:
            at.library.long = 900
            retrieval = Retrieval("docs", 1, every_tokens=8, probe_tokens=100)
            told = await whole(at.chat(retrieval=retrieval, max_tokens=24))
            inserted = [len(search.inserted) for search in told.searches[1:]]
            assert len(inserted) == 2
            assert all(60 <= count <= 100 for count in inserted)

    run(test())


NONSENSE = [
    {"choices": [7]},
    {"choices": {"a": 1}},
    {"choices": [{"index": "x", "delta": {"content": "a"}}]},
    {"choices": [{"index": 5, "delta": {"content": "a"}}]},
    {"choices": [{"index": 0, "delta": {"content": 7}}]},
    {"choices": [{"index": 0, "delta": "text"}]},
    {"choices": [], "usage": {"prompt_tokens": "many", "completion_tokens": 1}},
    {"choices": [], "usage": [1]},
]


@pytest.mark.parametrize("chunk", NONSENSE, ids=str)
def test_a_chunk_that_makes_no_sense_ends_its_request_with_a_typed_error(chunk: dict[str, Any]) -> None:
    async def test() -> None:
        async with stand(restarts=RestartLimits(0, 0)) as at:
            at.fake.says = [chunk]
            error = await _refusal(at.chat(max_tokens=4))
            assert type(error) is EngineFailed
            assert "makes no sense" in error.message
            assert [ended.code for ended in at.ended] == ["engine_failed"]
            assert at.fake.open == 0

    run(test())


def test_a_delta_that_is_null_is_an_empty_one() -> None:
    async def test() -> None:
        async with stand(restarts=RestartLimits(0, 0)) as at:
            at.fake.says = [
                {"choices": [{"index": 0, "delta": {"content": "a"}}]},
                {"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]},
            ]
            assert (await whole(at.chat())).text == "a"

    run(test())
