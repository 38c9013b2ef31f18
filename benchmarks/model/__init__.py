"""The language model alone: `python -m benchmarks.model`."""
