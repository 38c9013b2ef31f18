"""The pool's processes under load: `python -m benchmarks.pool`."""
