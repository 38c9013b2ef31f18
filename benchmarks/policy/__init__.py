"""The pool's policy, simulated: `python -m benchmarks.policy`."""
