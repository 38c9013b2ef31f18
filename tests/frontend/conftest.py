"""Clients of the `cluster` that a test file runs."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.frontend.cluster import Cluster


@pytest.fixture(scope="module", params=["frontend", "HTTP worker"])
def through(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The private socket of a `cluster` whose clients talk to an HTTP worker, None if they talk to the frontend."""
    return tmp_path_factory.mktemp("private") / "sock" if request.param == "HTTP worker" else None


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with cluster.http() as http:
        yield http


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with cluster.client() as client:
        yield client
