"""KV of the simulated node: blocks of rows and prompts, and prefix reuse."""
