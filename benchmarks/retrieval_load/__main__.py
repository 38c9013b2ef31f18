"""`python -m benchmarks.retrieval_load`: see `bench.py`."""

from benchmarks.retrieval_load.bench import main

if __name__ == "__main__":
    main()
