"""Benchmark of the rings against ZeroMQ: `python -m benchmarks.ring`."""
