"""`python -m benchmarks.model`: see `bench.py`."""

from benchmarks.model.bench import main

if __name__ == "__main__":
    main()
