"""Fault injection under load, and repeated starts and stops: `python -m benchmarks.faults`."""
