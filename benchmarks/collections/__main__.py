"""`python -m benchmarks.collections`: see `bench.py`."""

from benchmarks.collections.bench import main

if __name__ == "__main__":
    main()
