"""Fixtures of the tests of the embedding stage."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.retrieval.embedding_harness import SOON_S, Harness


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(**options: Any) -> Harness:
        made.append(Harness(**options))
        return made[-1]

    yield make
    for harness in made:
        harness.open()
        assert harness.stage.close(SOON_S)


@pytest.fixture
def harness(make: Callable[..., Harness]) -> Harness:
    return make()
