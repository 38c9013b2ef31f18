"""What benchmarks have in common, some of it with tests."""
