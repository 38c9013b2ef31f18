"""What it costs to have a node in front of a server, and what it survives: `python -m benchmarks.engines`."""
