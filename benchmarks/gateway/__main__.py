"""`python -m benchmarks.gateway`: see `bench.py`."""

from benchmarks.gateway.bench import main

if __name__ == "__main__":
    main()
