"""`python -m benchmarks.pool`: see `bench.py`."""

from benchmarks.pool.bench import main

if __name__ == "__main__":
    main()
