"""KV of the simulated node: blocks of rows and prompts, prefix reuse and early pulls."""
