"""What each process of a node does: pool, prefill, decode, frontend, supervisor, and the client that asks the pool."""
