"""KV of the simulated node: blocks of rows and prompts, prefix reuse, early pulls, and shared tiers."""
