"""Tests that background threads of a test or benchmark end with their block."""

import threading

import pytest

from runtime.testing.background import Background


def test_each_function_runs_in_its_own_thread_until_the_block_ends() -> None:
    both = threading.Barrier(3)
    ends: list[str] = []

    def run(name: str) -> None:
        both.wait(60)  # both run concurrently with each other and with the block
        assert running.ended.wait(60)
        ends.append(name)

    running = Background([lambda: run("a"), lambda: run("b")])
    with running:
        both.wait(60)
        assert ends == []
    assert sorted(ends) == ["a", "b"]


def test_an_exception_in_the_block_ends_them() -> None:
    running = Background([lambda: assert_ended(running)])
    with pytest.raises(ValueError, match="in the block"), running:
        raise ValueError("in the block")
    assert running.ended.is_set()


def assert_ended(running: Background) -> None:
    assert running.ended.wait(60)
