"""Tests that the model's results equal transformers', in any batch and with prompts in any chunks."""

import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import ConfigError, ContextLengthExceeded, InvalidRequest, ModelError
from runtime.serving.messages import Sampling
from runtime.serving.model.language_model import Chunk, LanguageModel
from runtime.serving.model.model_info import ModelInfo
from runtime.serving.model.sampler import Sampler
from runtime.testing.reference import Reference

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from runtime.serving.network.sampling import sample  # noqa: E402
from tests.serving.replays import Operations  # noqa: E402

VOCABULARY = 259


@pytest.fixture(params=["cpu", "gathered"])
def model(tiny_directory: Path, request: pytest.FixtureRequest) -> LanguageModel:
    """Return a model with CPU attention, and one with the attention of other devices on CPU tensors."""
    return LanguageModel.load(tiny_directory, block_tokens=16, blocks=6 * 32, context_tokens=512, kernels=request.param)


def ragged_prompts(count: int, seed: int, longest: int = 200) -> list[list[int]]:
    """Return prompts of 1 to `longest` tokens, with short and long ones equally likely."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(0, np.log(longest), count)).astype(int)
    return [random.integers(0, VOCABULARY, max(1, size)).tolist() for size in sizes]


def table(model: LanguageModel, row: int) -> list[int]:
    """Return scattered blocks for a row's whole context, disjoint from other rows'."""
    order: list[int] = np.random.default_rng(model.blocks).permutation(model.blocks).tolist()
    each = -(-model.context_tokens // model.block_tokens)
    return order[row * each : (row + 1) * each]


def at(model: LanguageModel, row: int, start: int, tokens: Sequence[int]) -> Chunk:
    """Return a chunk of a row."""
    return Chunk(table(model, row), start, tokens)


def greedy(logits: object) -> list[int]:
    return [int(token) for token in torch.as_tensor(logits).argmax(-1)]


class Batcher:
    """A minimal worker loop: prompts join in chunks of random size while others decode, and leave when done."""

    def __init__(self, model: LanguageModel, prompts: list[list[int]], answer_tokens: int, seed: int) -> None:
        self.model, self.prompts, self.answer_tokens = model, prompts, answer_tokens
        self.random = np.random.default_rng(seed)
        self.waiting = deque(range(len(prompts)))
        self.rows: dict[int, int] = {}  # place in the batch → prompt
        self.done: dict[int, int] = {}  # place → tokens whose KV is there
        self.answers: list[list[int]] = [[] for _ in prompts]

    def run(self) -> list[list[int]]:
        while self.waiting or self.rows:
            self._admit()
            places = self.random.permutation(list(self.rows)).tolist()
            chunks = [self._next_chunk(place) for place in places]
            for place, chunk, token in zip(places, chunks, greedy(self.model.forward(chunks)), strict=True):
                self._take(place, chunk, token)
        return self.answers

    def _admit(self) -> None:
        free = [place for place in range(6) if place not in self.rows]
        for place in self.random.permutation(free).tolist()[: int(self.random.integers(0, 3)) or not self.rows]:
            if self.waiting:
                self.rows[place], self.done[place] = self.waiting.popleft(), 0

    def _next_chunk(self, place: int) -> Chunk:
        row, done = self.rows[place], self.done[place]
        if done < len(self.prompts[row]):
            return at(self.model, place, done, self.prompts[row][done : done + int(self.random.integers(1, 150))])
        return at(self.model, place, done, self.answers[row][-1:])

    def _take(self, place: int, chunk: Chunk, token: int) -> None:
        row = self.rows[place]
        self.done[place] += len(chunk.tokens)
        if self.done[place] >= len(self.prompts[row]):
            self.answers[row].append(token)
            if len(self.answers[row]) == self.answer_tokens:
                del self.rows[place]


def test_sixty_ragged_prompts_in_chunks_joining_mid_decode_equal_generate(
    model: LanguageModel, reference: Reference
) -> None:
    prompts = ragged_prompts(60, seed=1)
    model.kv.fill_(float("nan"))  # reads of unwritten memory become visible
    assert Batcher(model, prompts, answer_tokens=16, seed=2).run() == [reference.generate(p, 16) for p in prompts]


def test_a_later_chunk_copies_its_own_blocks_and_not_the_whole_cache(tiny_directory: Path) -> None:
    model = LanguageModel.load(tiny_directory, block_tokens=16, blocks=4096, context_tokens=128)
    blocks = list(range(0, 4096, 512))
    model.forward([Chunk(blocks, 0, [3] * 40)])
    with torch.profiler.profile(profile_memory=True, acc_events=True) as seen:
        model.forward([Chunk(blocks, 40, [3] * 40)])
    largest = max(event.cpu_memory_usage for event in seen.events())
    side = model.kv[0, 0].nbytes  # the keys of one layer
    assert 0 < largest < side / 8


def test_a_batch_writes_only_the_positions_of_its_chunks(model: LanguageModel) -> None:
    model.kv.fill_(7.0)
    model.forward([at(model, 0, 0, [1, 2, 3]), at(model, 4, 511, [5]), at(model, 2, 100, [6] * 10)])
    written = torch.zeros(model.kv.shape[2], model.kv.shape[4], dtype=torch.bool)
    for row, positions in ((0, range(3)), (4, range(511, 512)), (2, range(100, 110))):
        for position in positions:
            written[table(model, row)[position // 16], position % 16] = True
    changed = (model.kv != 7.0).any(5).any(3)  # [layers, 2, blocks, block_tokens]
    assert torch.equal(changed, written.expand_as(changed))


def test_a_step_returns_the_tokens_sampled_from_the_logits_of_a_pass(model: LanguageModel) -> None:
    chunks = [at(model, row, 0, prompt) for row, prompt in enumerate(ragged_prompts(4, seed=3))]
    specs = [
        Sampling(8),
        None,
        Sampling(8, temperature=1.0, seed=5),
        Sampling(8, temperature=0.7, top_p=0.8, seed=6),
    ]
    scored = [False, True, True, False]
    logits = model.forward(chunks)
    found = model.step(chunks, [Sampler(one) if one else None for one in specs], scored)
    for drawn, one, row, wanted in zip(found, specs, logits, scored, strict=True):
        assert (one is None) == (drawn is None)
        if one is None or drawn is None:
            continue
        assert drawn.token == int(sample(row[None], [Sampler(one).next_spec()]))
        assert drawn.scores is None if not wanted else torch.equal(drawn.scores, row)
    assert model.step(chunks[:1], [None], [True]) == [None]


def test_a_gpu_pass_never_synchronises_and_uploads_its_inputs_in_one_copy(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value read by Python, or a result whose size depends on values, would wait for the device's queue."""
    from torch.nn.attention import bias  # imports torch's compiler, for seconds

    causal = bias.causal_lower_right

    def made_unseen(*sizes: int) -> Any:  # torch cannot create one under a dispatch mode; it is not an operation
        with _disable_current_modes():
            return causal(*sizes)

    monkeypatch.setattr(bias, "causal_lower_right", made_unseen)
    model = LanguageModel.load(tiny_directory, block_tokens=16, blocks=64, context_tokens=256, kernels="gathered")
    model.forward([Chunk(range(16), 0, [5] * 20), Chunk(range(16, 32), 0, [6] * 40)])
    operations = Operations()
    with operations:
        model.forward([Chunk(range(16), 20, [7]), Chunk(range(16, 32), 40, [8] * 9), Chunk(range(32, 48), 0, [9] * 3)])
    assert operations.names["index_put_"] or operations.names["_index_put_impl_"]
    waits = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}
    assert not waits & set(operations.names), operations.names
    assert operations.names["lift_fresh"] == 1, "one list of numbers becomes a tensor"


def test_chunks_may_share_the_blocks_of_a_common_prefix(model: LanguageModel, reference: Reference) -> None:
    prefix, ends = list(range(3, 35)), ([40, 41, 42], [50], [60] * 20)
    model.forward([at(model, 0, 0, prefix)])
    tables = [[*table(model, 0)[:2], *table(model, row + 1)[2:]] for row in range(len(ends))]
    logits = model.forward([Chunk(blocks, 32, end) for blocks, end in zip(tables, ends, strict=True)])
    assert greedy(logits) == [reference.generate([*prefix, *end], 1)[0] for end in ends]


def test_a_chunk_can_fill_its_row_to_the_last_position_and_no_further(
    model: LanguageModel, reference: Reference
) -> None:
    tokens = [3 + number % 200 for number in range(512)]
    model.forward([at(model, 1, 0, tokens[:500])])
    assert greedy(model.forward([at(model, 1, 500, tokens[500:])])) == reference.generate(tokens, 1)
    before = model.kv.clone()
    with pytest.raises(ContextLengthExceeded, match="513 tokens in a context of 512"):
        model.forward([at(model, 0, 0, [1]), at(model, 1, 511, [5, 6])])
    assert torch.equal(model.kv, before)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([], ValueError),
        ([Chunk([192], 0, [1])], ValueError),
        ([Chunk([-1], 0, [1])], ValueError),
        ([Chunk([0], -1, [1])], ValueError),
        ([Chunk([0], 0, [])], ValueError),
        ([Chunk([0], 0, [1] * 17)], ValueError),
        ([Chunk([0, 0], 0, [1] * 17)], ValueError),
        ([Chunk([0], 0, [1]), Chunk([0], 1, [1])], ValueError),
        ([Chunk([0], 0, [VOCABULARY])], InvalidRequest),
        ([Chunk([0], 0, [-1])], InvalidRequest),
    ],
)
def test_an_invalid_batch_is_rejected_before_anything_is_written(
    model: LanguageModel, chunks: list[Chunk], error: type[Exception]
) -> None:
    with pytest.raises(error):
        model.forward(chunks)
    assert not model.kv.any()


def test_the_kv_tensor_uses_the_given_buffer_and_has_the_announced_size(tiny_directory: Path) -> None:
    size = ModelInfo.read(tiny_directory).kv_bytes(8, 16)
    buffer = bytearray(size)
    model = LanguageModel.load(tiny_directory, block_tokens=16, blocks=8, context_tokens=64, buffer=memoryview(buffer))
    assert model.kv.nbytes == size
    model.forward([at(model, 1, 0, [1, 2])])
    assert np.array_equal(np.frombuffer(buffer, np.float32), model.kv.numpy().ravel())
    for wrong in (memoryview(bytearray(size - 1)), memoryview(bytes(size))):
        with pytest.raises(ConfigError, match="must be writable"):
            LanguageModel.load(tiny_directory, block_tokens=16, blocks=8, context_tokens=64, buffer=wrong)


def test_sizes_beyond_the_model_are_rejected_with_the_limit(tiny_directory: Path) -> None:
    for blocks, context_tokens, said in (
        (0, 64, "0 KV blocks"),
        (1, 4097, r"1\.\.4096"),
        (1, 0, "context_tokens is 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            LanguageModel.load(tiny_directory, block_tokens=16, blocks=blocks, context_tokens=context_tokens)


@pytest.fixture
def copied_model(tiny_directory: Path, tmp_path: Path) -> Path:
    for file in tiny_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here")
def test_a_device_without_torch_support_is_rejected_with_the_reason(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"a model on 'cuda:0': this torch .* (is a build without|finds no)"):
        LanguageModel.load(tiny_directory, block_tokens=16, blocks=1, context_tokens=8, device="cuda:0")


def test_damaged_weights_are_a_model_error(copied_model: Path) -> None:
    weights = copied_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load"):
        LanguageModel.load(copied_model, block_tokens=16, blocks=1, context_tokens=8)


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model 'gpt-5'"):
        LanguageModel.load("gpt-5", block_tokens=16, blocks=1, context_tokens=8)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelInfo.read(tmp_path)


def test_without_torch_the_error_names_the_install_command(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"python -m pip install 'torch>=2.11' 'safetensors'"):
        LanguageModel.load(tiny_directory, block_tokens=16, blocks=1, context_tokens=8)


def test_reading_a_models_sizes_imports_no_torch_and_loading_it_neither_transformers_nor_torch_s_compiler(
    tiny_directory: Path,
) -> None:
    program = (
        "import sys\n"
        "from runtime.serving.model import text\n"
        "from runtime.serving.model.language_model import Chunk, LanguageModel\n"
        "from runtime.serving.model.model_info import ModelInfo\n"
        "print(*(ModelInfo.read(name).kv_bytes(2, 64) for name in (sys.argv[1], 'smollm2-135m-instruct')))\n"
        "print({'torch', 'transformers', 'gguf'} & set(sys.modules))\n"
        "model = LanguageModel.load(sys.argv[1], blocks=2, block_tokens=16, context_tokens=32)\n"
        "model.forward([Chunk([0], 0, [5, 6]), Chunk([1], 0, [7])])\n"
        "print({'transformers', 'sympy', 'torch._dynamo', 'torch._inductor', 'gguf'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_directory)], capture_output=True, text=True, timeout=60, check=False
    )
    sizes = f"{2 * 2 * 2 * 2 * 64 * 16 * 4} {2 * 64 * 30 * 2 * 3 * 64 * 4}"
    assert (done.stdout.splitlines(), done.stderr) == ([sizes, "set()", "set()"], "")
