"""A frontend that takes over from a dead one waits for its workers, up to a limit."""

from runtime.serving.http.process import wait_until_ready
from tests.frontend.fake_workers import run


def test_a_takeover_waits_until_no_worker_is_missing() -> None:
    lacking = [["prefill", "decode", "pool"], ["decode"], ["decode"], []]
    assert run(wait_until_ready(lambda: lacking.pop(0), lambda: False)) == []
    assert lacking == []


def test_a_takeover_that_times_out_logs_what_is_missing() -> None:
    looks = [False, False, True]
    assert run(wait_until_ready(lambda: ["pool"], lambda: looks.pop(0))) == ["pool"]
    assert looks == []
