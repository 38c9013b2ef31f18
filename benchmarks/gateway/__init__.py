"""What a node adds to another server's answers: `python -m benchmarks.gateway`."""
