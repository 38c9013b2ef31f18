"""`python -m benchmarks.machine_code`: see `counts`."""

import sys

from benchmarks.machine_code.counts import main

if __name__ == "__main__":
    sys.exit(main())
