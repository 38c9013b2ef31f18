"""Fixtures of the serving tests: tiny models on disk and a way to run prompts through one as a worker would."""

from pathlib import Path

import pytest

from runtime.testing.tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Llama."""
    pytest.importorskip("torch", reason="the model needs the extra [llm]")
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
