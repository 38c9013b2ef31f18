"""Language model benchmark: `python -m benchmarks.model`."""
