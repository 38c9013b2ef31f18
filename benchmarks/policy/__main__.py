"""`python -m benchmarks.policy`: see `bench.py`."""

from benchmarks.policy.bench import main

if __name__ == "__main__":
    main()
