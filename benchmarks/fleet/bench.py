"""Latency that a load balancer adds: `python -m benchmarks.fleet --node http://127.0.0.1:8080`, for a running node.

Each installed balancer (haproxy, envoy, vllm-router) is started with the example of docs/examples/fleet, with
the node as two backends (under two names of the loopback). One client with one persistent connection per path
sends requests in pairs, direct and through the balancer, in random order; the table has medians, and the median
difference.
"""

import argparse
import http.client
import random
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.common.machine import machine
from benchmarks.common.report import table, write
from benchmarks.fleet.balancers import BALANCERS, balancing, installed
from benchmarks.fleet.pairs import HEAD, Request, pairs, row

_REQUESTS = (
    Request("GET", "/v1/models"),
    Request("POST", "/v1/retrieval", {"query": "the with statement", "k": 4}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", default="http://127.0.0.1:8080", help="URL of the node")
    parser.add_argument("--count", type=int, default=500, help="pairs per kind of request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="output files OUT.md and OUT.json")
    options = parser.parse_args()
    try:
        node = urlsplit(options.node)
        http.client.HTTPConnection(node.netloc, timeout=10).connect()
    except (ValueError, OSError, http.client.HTTPException) as error:
        raise SystemExit(f"--node {options.node} does not answer: {error}") from error
    order, rows = random.Random(options.seed), []
    for name in filter(installed, BALANCERS):
        nodes = [f"http://127.0.0.1:{node.port}", f"http://localhost:{node.port}"]
        with tempfile.TemporaryDirectory() as home, balancing(name, nodes, Path(home)) as url:
            for request in _REQUESTS:
                found = pairs(options.node, url, [request] * options.count, order)
                rows.append(row(name, f"{request.method} {request.path}", found))
    if not rows:
        raise SystemExit(f"none of {', '.join(BALANCERS)} is installed")
    head = ["balancer", *HEAD[1:]]
    caption = f"{', '.join(machine().values())}; {options.count} pairs, seed {options.seed}"
    write(
        [dict(zip(head, one, strict=True)) for one in rows], "\n".join([caption, "", *table(head, rows)]), options.out
    )
