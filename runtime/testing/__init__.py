"""What tests and benchmarks start: a node, a pool, workers that step, a tiny model; and a virtual clock."""
