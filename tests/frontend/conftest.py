"""Clients of the `cluster` that a test file runs."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.frontend.cluster import Cluster


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with cluster.http() as http:
        yield http


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with cluster.client() as client:
        yield client
