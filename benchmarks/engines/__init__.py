"""Overhead and fault tolerance of a node in front of a server: `python -m benchmarks.engines`."""
