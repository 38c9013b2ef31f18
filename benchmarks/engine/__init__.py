"""The search engine beside others: `python -m benchmarks.engine`."""
