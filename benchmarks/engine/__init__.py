"""Benchmark of the search engine against others: `python -m benchmarks.engine`."""
