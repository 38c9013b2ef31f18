"""Sections of `benchmarks.serve`, each a comparison with its baseline."""
