"""Fixtures of the serving tests: tiny models on disk, and workers that run prompts through them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.serving.model.model_info import ModelInfo, read_config
from runtime.testing.reference import Reference
from runtime.testing.tiny_model import make_tiny_llama
from tests.ipc.fake_cuda import FakeCuda
from tests.serving.workers import Start, Workers


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a tiny random Llama."""
    pytest.importorskip("torch", reason="the model needs the extra [llm]")
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def reference(tiny_directory: Path) -> Reference:
    return Reference(tiny_directory)


@pytest.fixture
def network(tiny_directory: Path) -> Any:
    """The tiny model's network in float32, on CPU tensors."""
    from runtime.serving.network.llama import Llama, WeightFiles

    return Llama.load(read_config(tiny_directory), ModelInfo.read(tiny_directory), WeightFiles(tiny_directory), "cpu")


@pytest.fixture
def cache(tiny_directory: Path) -> Any:
    """A paged cache for it, of random numbers."""
    import torch

    from runtime.serving.network.paged_cache import PagedCache
    from tests.serving.replays import BLOCK, BLOCKS

    shape = ModelInfo.read(tiny_directory).kv_shape(BLOCKS, BLOCK)
    return PagedCache(torch.randn(shape, generator=torch.Generator().manual_seed(1)), "gathered")


@pytest.fixture
def start(tiny_directory: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Return a factory of workers on CPUs or, if a test requests "GPU", on emulated GPUs with slow copies."""
    started: list[Workers] = []
    transport = None
    if getattr(request, "param", "CPU") == "GPU":
        pytest.importorskip("cuda.bindings.driver")
        from tests.serving.emulated_gpu import EmulatedTransport

        transport = EmulatedTransport(FakeCuda(lazy=True, copies_per_query=2))

    def starting(**options: Any) -> Workers:
        started.append(Workers(tiny_directory, transport=transport, **options))
        return started[-1]

    yield starting
    for workers in started:
        workers.close()
