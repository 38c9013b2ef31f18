"""Tests of the processes in the pool's benchmark."""

import os
from multiprocessing.connection import Connection

import pytest

from benchmarks.pool.processes import process


def dies(code: int, _pipe: Connection) -> None:
    os._exit(code)


def test_a_process_that_dies_is_not_waited_for() -> None:
    with process(dies, 3) as pipe, pytest.raises(EOFError):
        pipe.recv()
