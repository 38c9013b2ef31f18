"""Kills under load with known answers: `python -m benchmarks.faults`."""
