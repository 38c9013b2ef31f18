"""`python -m benchmarks.engines`: see `bench.py`."""

from benchmarks.engines.bench import main

if __name__ == "__main__":
    main()
