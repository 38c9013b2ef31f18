"""`python -m benchmarks.engines`: see `bench.py`."""

import sys

from benchmarks.engines.bench import main

if __name__ == "__main__":
    sys.exit(main())
