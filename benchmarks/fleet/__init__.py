"""Latency that a load balancer in front of nodes adds to a request: `python -m benchmarks.fleet`."""
