"""A frontend that takes a dead one's place waits for its workers, and not for ever."""

from runtime.serving.http.process import wait_until_ready
from tests.frontend.fake_workers import run


def test_it_waits_until_nothing_is_missing() -> None:
    lacking = [["prefill", "decode", "pool"], ["decode"], ["decode"], []]
    assert run(wait_until_ready(lambda: lacking.pop(0), lambda: False)) == []
    assert lacking == []


def test_when_the_wait_is_given_up_it_says_what_is_missing() -> None:
    looks = [False, False, True]
    assert run(wait_until_ready(lambda: ["pool"], lambda: looks.pop(0))) == ["pool"]
    assert looks == []
