import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.retrieval.live.validation import UpsertDocument
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.parts import KEY, Part


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Callable[[list[UpsertDocument]], tuple[Part, str]]]:
    """Starts a node with a part of the documents: the part, and the node's URL."""
    with contextlib.ExitStack() as nodes:

        def start(documents: list[UpsertDocument]) -> tuple[Part, str]:
            made = Part(tmp_path / f"part-{documents[0].id}-{len(documents)}", documents)
            settings = Settings(collections={"docs": 64}, api_keys=(KEY,))
            node = Cluster(prefills=0, decodes=0, settings=settings, search=made, catalogue=made)  # type: ignore[arg-type]
            nodes.enter_context(node)
            return made, node.url

        yield start
