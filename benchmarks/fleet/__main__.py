"""`python -m benchmarks.fleet`: see `bench.py`."""

from benchmarks.fleet.bench import main

if __name__ == "__main__":
    main()
