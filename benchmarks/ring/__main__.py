"""`python -m benchmarks.ring`: see `bench.py`."""

from benchmarks.ring.bench import main

if __name__ == "__main__":
    main()
