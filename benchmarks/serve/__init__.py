"""Benchmarks of prefill and decode under load, against their baselines: `python -m benchmarks.serve --help`."""
