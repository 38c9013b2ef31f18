"""Search a node's vector pool from any process of the same user, without HTTP.

python docs/examples/search.py NODE QUERIES.npy

NODE is a node's name or its run directory; QUERIES.npy has vectors [n, d].
"""

import sys

import numpy as np

from runtime import SearchClient
from runtime.errors import TrinityError

if len(sys.argv) != 3:
    print("usage: python docs/examples/search.py NODE QUERIES.npy", file=sys.stderr)
    sys.exit(2)
node, path = sys.argv[1:]
try:
    queries = np.load(path)
    with SearchClient.connect(node) as client:
        for result in client.search_batch(queries, k=5, deadline_ms=1000):
            print(result.ids.tolist(), result.distances.round(3).tolist())
except (OSError, EOFError, TypeError, ValueError) as error:
    sys.exit(f"{path}: {error}")
except TrinityError as error:
    sys.exit(error.message)
