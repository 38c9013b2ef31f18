"""Prefill and decode under load, against what they are meant to beat: `python -m benchmarks.serve --help`."""
