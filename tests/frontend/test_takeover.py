"""A frontend that takes a dead one's place waits for its workers, and not for ever."""

from runtime.serving.http.process import until_known
from tests.frontend.fakes import run


def test_it_waits_until_nothing_is_missing() -> None:
    lacking = [["prefill", "decode", "pool"], ["decode"], ["decode"], []]
    assert run(until_known(lambda: lacking.pop(0), lambda: False)) == []
    assert lacking == []


def test_when_the_wait_is_given_up_it_says_what_is_missing() -> None:
    looks = [False, False, True]
    assert run(until_known(lambda: ["pool"], lambda: looks.pop(0))) == ["pool"]
    assert looks == []
