"""How many threads embed in the frontend: the cores that no model worker on a CPU computes on."""

import os
from typing import Any

import pytest

from runtime.node.config import parse_config
from runtime.node.placement.layout import lay_out
from runtime.serving.http.process import embedding_threads


@pytest.mark.parametrize(
    ("cores", "sections", "threads"),
    [
        (2, {"collections": [{"name": "docs", "path": "docs"}]}, 2),
        (64, {"collections": [{"name": "docs", "path": "docs"}]}, 8),
        (6, {"model": {"name": "m"}, "prefill": {"threads": 2}, "decode": {"threads": 1}}, 3),
        (2, {"model": {"name": "m"}}, 1),
    ],
)
def test_the_frontend_embeds_on_the_cores_that_models_leave(
    monkeypatch: pytest.MonkeyPatch, cores: int, sections: dict[str, Any], threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert embedding_threads(lay_out(parse_config(sections))) == threads
