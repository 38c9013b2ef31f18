"""What the benchmarks count is counted right."""
