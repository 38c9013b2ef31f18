"""Overhead of a node in front of a server: `python -m benchmarks.engines`."""
