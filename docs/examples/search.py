"""Ask a node's vector pool from any process of the same user, without HTTP.

    python docs/examples/search.py NODE QUERIES.npy

NODE is a node's name or its run directory; QUERIES.npy has vectors [n, d].
"""

import sys

import numpy as np

from runtime import SearchClient

with SearchClient.connect(sys.argv[1]) as client:
    for result in client.search_batch(np.load(sys.argv[2]), k=5, deadline_ms=1000):
        print(result.ids.tolist(), result.distances.round(3).tolist())
