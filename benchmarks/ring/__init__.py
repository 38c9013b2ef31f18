"""The rings beside sockets: `python -m benchmarks.ring`."""
