"""Tests of the programs between attentions as torch compiles them for this processor: the operations that are fused are
those on a GPU, the code differs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.serving.model.compilation import ModelSetup
from runtime.serving.model.model_info import ModelInfo, read_config
from runtime.testing.reference import Reference
from runtime.testing.tiny_model import make_tiny_llama
from tests.cuda.emulation import require_compiler

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.network import decoder  # noqa: E402
from runtime.serving.network.llama import Llama, WeightFiles  # noqa: E402
from runtime.serving.network.paged_cache import PagedBatch, PagedCache  # noqa: E402
from tests.serving.replays import Operations, Replays, greedy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's compiler
BLOCK, BLOCKS = 16, 60
LENGTHS = [1, 50, 31]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    require_compiler()


def loaded(directory: Path) -> tuple[Llama, PagedCache]:
    info = ModelInfo.read(directory)
    network = Llama.load(read_config(directory), info, WeightFiles(directory), "cpu")
    return network, PagedCache(torch.zeros(info.kv_shape(BLOCKS, BLOCK)), "gathered")


@pytest.fixture
def fresh_compiler() -> Iterator[Any]:
    """Return torch's compiler without programs. Only a process that needs it imports it, for 2 s."""
    from torch import _dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield dynamo
    dynamo.reset()


@pytest.mark.timeout(900)  # it compiles for a minute of a core that is its own, and three processes test
def test_three_programs_serve_all_layers_and_sizes_with_transformers_tokens(
    tmp_path: Path, fresh_compiler: Any
) -> None:
    from torch._inductor import metrics

    directory = make_tiny_llama(tmp_path / "model", layers=3)
    (network, cache), random = loaded(directory), np.random.default_rng(4)
    with Operations() as eager, torch.inference_mode():
        network.logits(PagedBatch(cache, [([0], 0, 9)], [1] * 9))
    metrics.reset()
    assert network.compile(cache)
    assert not cache.kv.any()
    order = random.permutation(BLOCKS).tolist()
    prompts = [random.integers(0, 259, length).tolist() for length in LENGTHS]
    answers = greedy(network, cache, [order[6 * row : 6 * row + 6] for row in range(3)], prompts, 6)
    assert fresh_compiler.utils.counters["stats"]["unique_graphs"] == 3
    fused = metrics.generated_kernel_count
    assert eager.count >= 40 * 3, "operations a layer"
    assert 3 <= fused <= 40, "kernels of all three programs, most of them in loops of one"
    reference = Reference(directory)
    assert answers == [reference.generate(prompt, 6) for prompt in prompts]


def test_two_layers_leave_in_torchs_cache_what_the_whole_model_compiles(tmp_path: Path, fresh_compiler: Any) -> None:
    setup = ModelSetup(
        name=str(make_tiny_llama(tmp_path / "model", layers=3)), blocks=BLOCKS, block_tokens=BLOCK, context_tokens=512,
        device="cpu", weights="float32", kernels="gathered", rows=4, tokens=100,
    )  # fmt: skip

    def compile_with(layers: int | None) -> Any:
        fresh_compiler.reset()
        fresh_compiler.utils.counters.clear()
        for _ in setup.load(layers=layers).compile([0, 1, 2, 3], rows=4, tokens=100, capture=Replays()):
            pass
        return fresh_compiler.utils.counters

    compile_with(2)
    counted = compile_with(None)
    assert counted["stats"]["unique_graphs"] == 3, "also for steps of rows"
    assert counted["inductor"]["fxgraph_cache_miss"] == counted["aot_autograd"]["autograd_cache_miss"] == 0, counted


def test_layers_stay_eager_if_compilation_fails_or_is_wrong(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network, cache = loaded(tiny_directory)
    eager = network.programs

    def failing() -> decoder.Programs:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("runtime.serving.network.llama.compiled_programs", failing)
    assert not network.compile(cache)
    assert "layers run uncompiled, several times slower, on cpu: no compiler here" in caplog.text
    wrong = eager._replace(finish=lambda *arguments: eager.finish(*arguments) * 1.1)
    monkeypatch.setattr("runtime.serving.network.llama.compiled_programs", lambda: wrong)
    assert not network.compile(cache)
    assert "the logits differ by 1.0e-01 of their norm" in caplog.text
    assert network.programs == eager
    assert not cache.kv.any()
