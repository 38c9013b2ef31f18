"""Tests that the logits of every Llama variant that a `config.json` can describe equal those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError, ModelError
from runtime.serving.model.language_model import Chunk, LanguageModel
from runtime.serving.model.model_info import weights_type
from runtime.testing.reference import Reference

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")
transformers = pytest.importorskip("transformers", reason="the reference needs the extra [test]")

from runtime.serving.network.llama import Rope  # noqa: E402  (it imports torch)

ROPE = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
}
TOKENS = [3 + 7 * number % 250 for number in range(90)]


def llama(directory: Path, tokenizer: Path, *, dtype: str = "float32", **changes: Any) -> Path:
    """Create a model with random weights and biases in several files, and the tokenizer files of another."""
    shutil.copytree(tokenizer, directory)
    (directory / "model.safetensors").unlink()
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
            "initializer_range": 0.2,
        } | changes
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = transformers.LlamaForCausalLM(config)
        for parameter in network.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
        network.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="100KB")
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": 32, "rms_norm_eps": 1e-3},
        {"num_key_value_heads": 4},
        {"dtype": "bfloat16"},
        *({"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}} for kind, more in ROPE.items()),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, tiny_directory: Path, changes: dict[str, Any]) -> None:
    directory = llama(tmp_path / "model", tiny_directory, **changes)
    model = LanguageModel.load(directory, blocks=8, block_tokens=16, context_tokens=128)
    expected = Reference(directory).logits(TOKENS)
    for begin, end in ((0, 40), (40, 41), (41, 90)):
        logits = model.forward([Chunk(range(8), begin, TOKENS[begin:end])])
        torch.testing.assert_close(logits[0], expected[end - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ROPE)
def test_rope_angles_equal_those_of_transformers_far_into_the_context(kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 500000.0, **ROPE[kind]}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=8192, rope_parameters=parameters
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 17, 1000, 8191])
    cosines, sines = Rope(config.to_dict(), 64, "cpu").angles(positions)
    for ours, wanted in zip((cosines, sines), theirs(torch.zeros(1), positions[None]), strict=True):
        torch.testing.assert_close(ours, wanted[0])


def test_rope_parameters_of_older_files_are_read() -> None:
    old = {"max_position_embeddings": 512, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    positions = torch.arange(5)
    assert torch.equal(Rope(old, 16, "cpu").angles(positions)[0], Rope(new, 16, "cpu").angles(positions)[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"vocab_size": 1 << 40}, "not an integer in 1..16777216"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"intermediate_size": "many"}, "intermediate_size is 'many'"),
        ({"intermediate_size": 100}, r"config.json says \[100, 64\]"),
        ({"rope_parameters": {"rope_type": "linear"}}, "invalid RoPE parameters .*: KeyError"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "invalid RoPE parameters"),
        ({"attention_bias": True}, "lack 8 tensors, such as model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_a_config_that_is_not_supported_or_does_not_match_the_weights_is_rejected_with_its_field(
    tmp_path: Path, tiny_directory: Path, change: dict[str, Any], said: str
) -> None:
    directory = llama(tmp_path / "model", tiny_directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=said):
        LanguageModel.load(directory, blocks=8, block_tokens=16, context_tokens=128)


def test_an_index_cannot_name_files_in_other_directories(tmp_path: Path, tiny_directory: Path) -> None:
    directory = llama(tmp_path / "model", tiny_directory)
    index = directory / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    moved = {name: f"../elsewhere/{file}" for name, file in found["weight_map"].items()}
    shutil.copytree(directory, tmp_path / "elsewhere")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    index.write_text(json.dumps(found | {"weight_map": moved}))
    with pytest.raises(ModelError, match="cannot load the model"):
        LanguageModel.load(directory, blocks=8, block_tokens=16, context_tokens=128)


@pytest.mark.parametrize("content", ["[]", "{}", "not JSON", '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_a_model_error(tmp_path: Path, tiny_directory: Path, content: str) -> None:
    directory = llama(tmp_path / "model", tiny_directory)
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"cannot load the model|lack"):
        LanguageModel.load(directory, blocks=8, block_tokens=16, context_tokens=128)


@pytest.mark.parametrize("kernels", ["cpu", "gathered"])
@pytest.mark.parametrize(("weights", "least", "most"), [("bfloat16", 1e-4, 0.03), ("float16", 1e-5, 0.004)])
def test_bfloat16_logits_are_close_to_those_of_transformers(
    tmp_path: Path, tiny_directory: Path, weights: Any, kernels: Any, least: float, most: float
) -> None:
    directory = llama(tmp_path / "model", tiny_directory, hidden_size=512, intermediate_size=1024)
    model = LanguageModel.load(
        directory, blocks=8, block_tokens=16, context_tokens=128, weights=weights, kernels=kernels
    )
    logits, expected = model.forward([Chunk(range(8), 0, TOKENS)])[0], Reference(directory).logits(TOKENS)[-1]
    error = float((logits - expected).norm() / expected.norm())
    assert least < error < most


@pytest.mark.parametrize(
    ("weights", "device", "flags", "expected"),
    [
        ("auto", "cpu", "fpu avx512f avx512_bf16", "bfloat16"),
        ("auto", "cpu", "fpu avx2 amx_bf16 amx_tile", "bfloat16"),
        ("auto", "cpu", "fpu avx2 amx_bf16 amx_tile amx_int8", "int8"),
        ("auto", "cpu", "fpu avx512f avx512_vnni avx512_bf16", "bfloat16"),
        ("bfloat16", "cpu", "fpu amx_bf16 amx_tile amx_int8", "bfloat16"),
        ("int8", "cpu", "fpu avx2", "int8"),
        ("auto", "cpu", "fp asimd bf16 i8mm", "bfloat16"),
        ("auto", "cpu", "fpu avx2 avx512f avx512_fp16", "float32"),
        ("auto", "cuda:0", "fpu avx2", "bfloat16"),
        ("float32", "cpu", "fpu avx512_bf16", "float32"),
        ("bfloat16", "cpu", "fpu avx2", "bfloat16"),
    ],
)
def test_the_type_of_weights_depends_on_the_device(
    tmp_path: Path, weights: Any, device: str, flags: str, expected: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags : {flags}\n")
    assert weights_type(weights, device, cpuinfo) == expected
    assert weights_type("auto", "cpu", tmp_path / "none") == "float32"


def test_int8_weights_are_rejected_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="'int8' is supported on CPUs only, not on 'cuda:0'"):
        weights_type("int8", "cuda:0")
