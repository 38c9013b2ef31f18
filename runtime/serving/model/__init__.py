"""Language model: loading, tokenizer, prompts, sampling, and text streaming."""
