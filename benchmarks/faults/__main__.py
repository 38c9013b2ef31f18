"""`python -m benchmarks.faults`: see `bench.py`."""

import sys

from benchmarks.faults.bench import main

if __name__ == "__main__":
    sys.exit(main())
