"""The language model: weights, tokens, prompts, sampling, and its KV cache."""
