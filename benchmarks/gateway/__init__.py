"""Overhead of a node per chunk of another server's stream: `python -m benchmarks.gateway`."""
