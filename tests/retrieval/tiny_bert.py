"""Tiny BERT models with random weights: sentence-transformers directories as safetensors, and their vectors by
transformers, an implementation that shares no code with ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")
pytest.importorskip("safetensors")

from tests.retrieval.tiny_model import write_tiny_model  # noqa: E402

WORDS = 400
_CLASSES = {"bert": "Bert", "xlm-roberta": "XLMRoberta"}


def write_tiny_bert(directory: Path, kind: str = "bert", **settings: Any) -> Path:
    """Write `config.json` and `model.safetensors` to a directory, with a tokenizer and another model in ONNX form."""
    import transformers  # takes seconds

    write_tiny_model(directory, pooling=settings.pop("pooling", None), max_tokens=settings.pop("max_tokens", 80))
    sizes = {"vocab_size": WORDS, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = getattr(transformers, f"{_CLASSES[kind]}Config")(
        **sizes, intermediate_size=96, max_position_embeddings=130, pad_token_id=1 if kind == "xlm-roberta" else 0,
        **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{_CLASSES[kind]}Model")(config)
    with torch.no_grad():  # as drawn, all texts have almost the same vector, and biases are zero
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(directory)
    return directory


def expected_states(directory: Path, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the last hidden states [tokens, hidden] of one text, alone."""
    import transformers

    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval().float()
    with torch.inference_mode():
        found: npt.NDArray[np.float32] = model(torch.tensor([list(ids)])).last_hidden_state[0].numpy()
    return found
