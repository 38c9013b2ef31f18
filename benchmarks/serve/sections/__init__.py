"""The comparisons of `benchmarks.serve`, each with what it is meant to beat."""
