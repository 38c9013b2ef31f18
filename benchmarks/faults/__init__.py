"""Kills under load, starts and stops: `python -m benchmarks.faults`."""
