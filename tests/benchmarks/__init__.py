"""Tests of the benchmarks' measurements and reports."""
