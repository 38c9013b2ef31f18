"""The model computes what transformers computes, whatever shares its batches and however prompts are cut."""

import json
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import ConfigError, ContextLengthExceeded, InvalidRequest, ModelError
from runtime.serving.model.language_model import Chunk, LanguageModel
from runtime.serving.model.model_info import ModelInfo
from tests.serving.reference import Reference
from tests.serving.tiny_model import make_tiny_llama

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.serving.model.slot_cache import SlotCache  # noqa: E402  (it imports torch)

VOCABULARY = 259


@pytest.fixture(scope="module")
def reference(tiny_directory: Path) -> Reference:
    return Reference(tiny_directory)


@pytest.fixture
def model(tiny_directory: Path) -> LanguageModel:
    return LanguageModel.load(tiny_directory, slots=6, context_tokens=512)


def ragged_prompts(count: int, seed: int, longest: int = 200) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, short ones as likely as long ones."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(0, np.log(longest), count)).astype(int)
    return [random.integers(0, VOCABULARY, max(1, size)).tolist() for size in sizes]


def greedy(logits: object) -> list[int]:
    return [int(token) for token in torch.as_tensor(logits).argmax(-1)]


def continue_greedily(model: LanguageModel, slot: int, tokens: Sequence[int], first: int, count: int) -> list[int]:
    """`count` tokens after `tokens`, whose KV is in `slot`; `first` is the first of them."""
    answer = [first]
    while len(answer) < count:
        answer += greedy(model.forward([Chunk(slot, len(tokens) + len(answer) - 1, answer[-1:])]))
    return answer


class Batcher:
    """A worker's loop in miniature: prompts join in chunks of random size while others decode, and leave when done."""

    def __init__(self, model: LanguageModel, prompts: list[list[int]], answer_tokens: int, seed: int) -> None:
        self.model, self.prompts, self.answer_tokens = model, prompts, answer_tokens
        self.random = np.random.default_rng(seed)
        self.waiting = deque(range(len(prompts)))
        self.rows: dict[int, int] = {}  # slot → prompt
        self.done: dict[int, int] = {}  # slot → tokens whose KV is in the slot
        self.answers: list[list[int]] = [[] for _ in prompts]

    def run(self) -> list[list[int]]:
        while self.waiting or self.rows:
            self._admit()
            chunks = [self._next_chunk(slot) for slot in self.random.permutation(list(self.rows)).tolist()]
            for chunk, token in zip(chunks, greedy(self.model.forward(chunks)), strict=True):
                self._take(chunk, token)
        return self.answers

    def _admit(self) -> None:
        free = [slot for slot in range(self.model.slots) if slot not in self.rows]
        for slot in self.random.permutation(free).tolist()[: int(self.random.integers(0, 3)) or not self.rows]:
            if self.waiting:
                self.rows[slot], self.done[slot] = self.waiting.popleft(), 0

    def _next_chunk(self, slot: int) -> Chunk:
        row, done = self.rows[slot], self.done[slot]
        if done < len(self.prompts[row]):
            return Chunk(slot, done, self.prompts[row][done : done + int(self.random.integers(1, 150))])
        return Chunk(slot, done, self.answers[row][-1:])

    def _take(self, chunk: Chunk, token: int) -> None:
        row = self.rows[chunk.slot]
        self.done[chunk.slot] += len(chunk.tokens)
        if self.done[chunk.slot] >= len(self.prompts[row]):
            self.answers[row].append(token)
            if len(self.answers[row]) == self.answer_tokens:
                del self.rows[chunk.slot]


def test_sixty_ragged_prompts_in_chunks_joining_mid_decode_equal_generate(
    model: LanguageModel, reference: Reference
) -> None:
    prompts = ragged_prompts(60, seed=1)
    model.kv.fill_(float("nan"))  # whatever is read without having been written would show
    assert Batcher(model, prompts, answer_tokens=16, seed=2).run() == [reference.generate(p, 16) for p in prompts]


def test_several_cores_give_what_one_gives(model: LanguageModel, reference: Reference) -> None:
    model._cache = SlotCache(model.kv, one_core=False)  # as with threads=2; threads are the whole process's
    model.kv.fill_(float("nan"))
    prompts = ragged_prompts(12, seed=10)
    assert Batcher(model, prompts, answer_tokens=12, seed=11).run() == [reference.generate(p, 12) for p in prompts]


def test_a_model_large_enough_for_packed_layers_equals_generate_too(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path, seed=3, layers=2, hidden=512)
    model = LanguageModel.load(directory, slots=4, context_tokens=256)
    reference = Reference(directory)
    prompts = ragged_prompts(12, seed=8)
    assert Batcher(model, prompts, answer_tokens=12, seed=9).run() == [reference.generate(p, 12) for p in prompts]


def test_kv_copied_from_another_models_shared_memory_decodes_as_generate_does(
    tiny_directory: Path, reference: Reference
) -> None:
    shared = bytearray(LanguageModel.kv_bytes(tiny_directory, slots=3, context_tokens=256))
    prefill = LanguageModel.load(tiny_directory, slots=3, context_tokens=256, buffer=memoryview(shared))
    decode = LanguageModel.load(tiny_directory, slots=4, context_tokens=300)
    decode.kv.fill_(float("nan"))
    seen = memoryview(shared).toreadonly()
    for number, prompt in enumerate(ragged_prompts(12, seed=3)):
        prefill_slot, decode_slot = number % 3, number % 4
        first = greedy(prefill.forward([Chunk(prefill_slot, 0, prompt)]))[0]
        decode.copy_kv(seen, prefill_slot, decode_slot, len(prompt), source_context_tokens=256)
        answer = continue_greedily(decode, decode_slot, prompt, first, 12)
        assert answer == reference.generate(prompt, 12)


def test_kv_copied_from_another_models_tensor_is_the_same(tiny_directory: Path, model: LanguageModel) -> None:
    other = LanguageModel.load(tiny_directory, slots=1, context_tokens=64)
    other.forward([Chunk(0, 0, list(range(50)))])
    model.copy_kv(other.kv, 0, 5, 50)
    assert torch.equal(model.kv[:, :, 5, :, :50], other.kv[:, :, 0, :, :50])
    assert not model.kv[:, :, 5, :, 50:].any()
    assert not model.kv[:, :, :5].any()


def test_passages_appended_before_the_last_sampled_token_equal_a_fresh_run(
    model: LanguageModel, reference: Reference
) -> None:
    for prompt, passages in zip(ragged_prompts(8, seed=4), ragged_prompts(8, seed=5), strict=True):
        first = greedy(model.forward([Chunk(2, 0, prompt)]))[0]
        answer = continue_greedily(model, 2, prompt, first, 7)
        start = len(prompt) + len(answer) - 1  # the last sampled token has no KV yet
        after = greedy(model.forward([Chunk(2, start, [*passages, answer[-1]])]))[0]
        sequence = [*prompt, *answer[:-1], *passages, answer[-1]]
        assert continue_greedily(model, 2, sequence, after, 9) == reference.generate(sequence, 9)


def test_logits_are_close_to_those_of_one_pass_over_the_sequence(model: LanguageModel, reference: Reference) -> None:
    tokens = ragged_prompts(1, seed=6)[0] + list(range(150))
    expected = reference.logits(tokens)
    for begin, end in ((0, 1), (1, 40), (40, 41), (41, len(tokens))):
        logits = model.forward([Chunk(0, begin, tokens[begin:end])])
        assert logits.shape == (1, VOCABULARY)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits[0], expected[end - 1], rtol=1e-4, atol=1e-5)


def test_a_batch_writes_only_the_positions_of_its_own_chunks(model: LanguageModel) -> None:
    model.kv.fill_(7.0)
    model.forward([Chunk(0, 0, [1, 2, 3]), Chunk(4, 511, [5]), Chunk(2, 100, [6] * 10)])
    written = torch.zeros(model.kv.shape[2], model.kv.shape[4], dtype=torch.bool)
    written[0, :3] = written[4, 511] = written[2, 100:110] = True
    changed = (model.kv != 7.0).any(5).any(3)  # [layers, 2, slots, context]
    assert torch.equal(changed, written.expand_as(changed))


def test_a_chunk_may_fill_its_slot_to_the_last_position_and_no_further(
    model: LanguageModel, reference: Reference
) -> None:
    tokens = [3 + number % 200 for number in range(512)]
    model.forward([Chunk(1, 0, tokens[:500])])
    assert greedy(model.forward([Chunk(1, 500, tokens[500:])])) == reference.generate(tokens, 1)
    before = model.kv.clone()
    with pytest.raises(ContextLengthExceeded, match="513 tokens in a context of 512"):
        model.forward([Chunk(0, 0, [1]), Chunk(1, 511, [5, 6])])
    assert torch.equal(model.kv, before)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([], ValueError),
        ([Chunk(6, 0, [1])], ValueError),
        ([Chunk(-1, 0, [1])], ValueError),
        ([Chunk(0, -1, [1])], ValueError),
        ([Chunk(0, 0, [])], ValueError),
        ([Chunk(0, 0, [1]), Chunk(0, 1, [1])], ValueError),
        ([Chunk(0, 0, [VOCABULARY])], InvalidRequest),
        ([Chunk(0, 0, [-1])], InvalidRequest),
    ],
)
def test_an_impossible_batch_is_refused_before_anything_is_written(
    model: LanguageModel, chunks: list[Chunk], error: type[Exception]
) -> None:
    with pytest.raises(error):
        model.forward(chunks)
    assert not model.kv.any()


def test_a_copy_outside_either_side_is_refused(model: LanguageModel) -> None:
    for from_slot, to_slot in ((6, 0), (0, 6), (-1, 0)):
        with pytest.raises(ValueError, match="not one of 6 slots"):
            model.copy_kv(model.kv, from_slot, to_slot, 1)
    with pytest.raises(ContextLengthExceeded, match="513 tokens"):
        model.copy_kv(model.kv, 0, 1, 513)
    with pytest.raises(ValueError, match="holds no slot"):
        model.copy_kv(memoryview(bytes(100)), 0, 0, 1)
    with pytest.raises(ValueError, match="not of this model"):
        model.copy_kv(torch.zeros(2, 2, 6, 4, 512, 16), 0, 0, 1)


def test_the_kv_tensor_lies_in_the_given_buffer_and_has_the_announced_size(tiny_directory: Path) -> None:
    size = LanguageModel.kv_bytes(tiny_directory, slots=2, context_tokens=64)
    buffer = bytearray(size)
    model = LanguageModel.load(tiny_directory, slots=2, context_tokens=64, buffer=memoryview(buffer))
    assert model.kv.nbytes == size
    model.forward([Chunk(1, 0, [1, 2])])
    assert np.array_equal(np.frombuffer(buffer, np.float32), model.kv.numpy().ravel())
    for wrong in (memoryview(bytearray(size - 1)), memoryview(bytes(size))):
        with pytest.raises(ConfigError, match="must be writable"):
            LanguageModel.load(tiny_directory, slots=2, context_tokens=64, buffer=wrong)


def test_sizes_that_the_model_cannot_have_are_refused_with_the_limit(tiny_directory: Path) -> None:
    for slots, context_tokens, said in ((0, 64, "slots is 0"), (1, 4097, "1..4096"), (1, 0, "context_tokens is 0")):
        with pytest.raises(ConfigError, match=said):
            LanguageModel.load(tiny_directory, slots=slots, context_tokens=context_tokens)
        with pytest.raises(ConfigError, match=said):
            LanguageModel.kv_bytes(tiny_directory, slots, context_tokens)


def test_the_number_of_threads_is_set(tiny_directory: Path) -> None:
    LanguageModel.load(tiny_directory, slots=1, context_tokens=8)
    assert torch.get_num_threads() == 1


@pytest.fixture
def copied_model(tiny_directory: Path, tmp_path: Path) -> Path:
    for file in tiny_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_damaged_weights_are_a_model_error(copied_model: Path) -> None:
    weights = copied_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load"):
        LanguageModel.load(copied_model, slots=1, context_tokens=8)


def test_missing_weights_are_an_error_and_never_random_numbers(copied_model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copied_model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copied_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, such as model.layers.1.mlp.up_proj.weight"):
        LanguageModel.load(copied_model, slots=1, context_tokens=8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"vocab_size": 1 << 40}, "not an integer in 1..16777216"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_its_field(
    copied_model: Path, change: dict[str, object], said: str
) -> None:
    config = json.loads((copied_model / "config.json").read_text())
    (copied_model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=said):
        ModelInfo.read(copied_model)


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model 'gpt-5'"):
        LanguageModel.load("gpt-5", slots=1, context_tokens=8)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelInfo.read(tmp_path)


def test_without_torch_the_error_has_the_command_that_installs_it(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"python -m pip install 'torch>=2.6' 'transformers>=5,<6' 'safetensors'"):
        LanguageModel.load(tiny_directory, slots=1, context_tokens=8)


def test_neither_importing_the_model_nor_reading_its_sizes_imports_torch(tiny_directory: Path) -> None:
    program = (
        "import sys\n"
        "from runtime.serving.model import prompt, sampling, text\n"
        "from runtime.serving.model.language_model import LanguageModel\n"
        "print(LanguageModel.kv_bytes(sys.argv[1], 2, 64), LanguageModel.kv_bytes('smollm2-135m-instruct', 1, 1))\n"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.stdout.split() == [str(2 * 2 * 2 * 2 * 64 * 16 * 4), str(30 * 2 * 3 * 64 * 4)]
