"""Helpers shared by benchmarks, and by some tests."""
