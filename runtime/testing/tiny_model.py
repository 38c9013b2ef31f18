"""A tiny Llama with random weights for tests and load, written to a directory in transformers' format."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tiny_llama(directory: Path, seed: int = 0, *, layers: int = 2, hidden: int = 64) -> Path:
    """Write config, safetensors and a byte-level tokenizer (259 tokens) with a chat template; returns `directory`.

    4 query heads share 2 KV heads; 4,096 tokens of context. The same seed gives the same weights.
    """
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights = _weights(seed, len(tokens), layers, hidden)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights(seed: int, vocabulary: int, layers: int, hidden: int) -> "dict[str, torch.Tensor]":
    """Initialize weights as transformers' LlamaForCausalLM does, whose import takes more than a second."""
    import torch
    from torch import nn

    inner, shared = 2 * hidden, hidden // 2
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, shared),
        "self_attn.v_proj": (hidden, shared), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts: dict[str, Any] = {"model.embed_tokens": nn.Embedding(vocabulary, hidden)}
        for layer in range(layers):
            for name, size in sizes.items():
                parts[f"model.layers.{layer}.{name}"] = nn.Linear(*size, bias=False)
        weights = {f"{name}.weight": _initialized(part) for name, part in parts.items()}
        weights["lm_head.weight"] = _initialized(nn.Linear(hidden, vocabulary, bias=False))
    weights["model.embed_tokens.weight"][2] = 0.0  # the padding token
    norms = [f"layers.{n}.{name}_layernorm" for n in range(layers) for name in ("input", "post_attention")]
    return weights | {f"model.{name}.weight": torch.ones(hidden) for name in (*norms, "norm")}


def _initialized(part: Any) -> "torch.Tensor":
    """Draw weights far enough apart that greedy decoding is unambiguous."""
    weight: torch.Tensor = part.weight.detach().normal_(0.0, 0.2)
    return weight
