"""KV of the simulated node: prefix reuse, and what the router knows of it."""
