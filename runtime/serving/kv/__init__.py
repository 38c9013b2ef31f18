"""KV cache: block manager, tiers, and transport between processes."""
