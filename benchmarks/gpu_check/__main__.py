"""`python -m benchmarks.gpu_check`: see `bench.py`."""

import sys

from benchmarks.gpu_check.bench import main

if __name__ == "__main__":
    sys.exit(main())
