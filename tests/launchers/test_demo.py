"""`trinity demo`: preparation before its node starts."""

import os
from pathlib import Path
from typing import Any

import pytest

from launchers.commands.demo import prepare_collection
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.sources import no_progress


def test_the_reference_is_embedded_with_every_core_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(bulk_load, "build", lambda source, out, **options: told.update(options, out=out))
    assert prepare_collection(tmp_path / "demo", no_progress) == told["out"]
    assert told["threads"] == len(os.sched_getaffinity(0))
