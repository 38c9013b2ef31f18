"""Test harness of tests and benchmarks: nodes, in-process pools, workers, a tiny model, a virtual clock."""
