"""`python -m benchmarks.engine`: see `bench.py`."""

from benchmarks.engine.bench import main

if __name__ == "__main__":
    main()
