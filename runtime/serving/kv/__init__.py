"""KV blocks: who holds which, where they are kept, and how they move between processes."""
