"""What a balancer adds to a request: `python -m benchmarks.fleet --node http://127.0.0.1:8080`, of a node that runs.

Each balancer that is installed (haproxy, envoy, vllm-router) is started with what `trinity fleet` prints for it, the
node behind it twice over (under two names of the loopback). One client, one kept connection a way, requests in pairs,
direct and through the balancer, in a random order; the table has the medians, and that of the pairs' differences. With
--front so are requests to a node that has the first one's collection by [[remote]].
"""

import argparse
import http.client
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common.machine import machine
from benchmarks.common.report import table, write
from benchmarks.fleet.balancers import PRINTED, balancing, installed

_REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "GET /v1/models": ("GET", "/v1/models", None),
    "POST /v1/retrieval": ("POST", "/v1/retrieval", {"query": "the with statement", "k": 4}),
}


def _seconds(connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None) -> float:
    begin = time.perf_counter()
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise SystemExit(f"{method} {path}: {answer.status}")
    return time.perf_counter() - begin


def _pairs(direct: str, through: str, request: str, count: int, order: random.Random) -> list[tuple[float, float]]:
    ways = [http.client.HTTPConnection(urlsplit(url).netloc, timeout=60) for url in (direct, through)]
    found = []
    for number in range(-20, count):  # the first ones warm up
        took = [0.0, 0.0]
        for way in order.sample((0, 1), 2):
            took[way] = _seconds(ways[way], *_REQUESTS[request])
        if number >= 0:
            found.append((took[0], took[1]))
    for connection in ways:
        connection.close()
    return found


def _row(name: str, request: str, pairs: list[tuple[float, float]]) -> list[str]:
    direct, through = zip(*pairs, strict=True)
    added = [after - before for before, after in pairs]
    p99 = quantiles(through, n=100)[-1] - quantiles(direct, n=100)[-1]
    return [name, request, *(f"{1e3 * value:.2f}" for value in (median(direct), median(through), median(added), p99))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", default="http://127.0.0.1:8080", help="the node's URL")
    parser.add_argument("--front", default="", help="a node whose only collection is that node's, by [[remote]]")
    parser.add_argument("--count", type=int, default=500, help="pairs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to keep the table: OUT.md and OUT.json")
    options = parser.parse_args()
    port, order, rows = urlsplit(options.node).port, random.Random(options.seed), []
    for name in filter(installed, PRINTED):
        nodes = [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]
        with tempfile.TemporaryDirectory() as home, balancing(name, nodes, Path(home)) as url:
            for request in _REQUESTS:
                pairs = _pairs(options.node, url, request, options.count, order)
                rows.append(_row(name, request, pairs))
    if options.front:
        request = "POST /v1/retrieval"
        rows.append(_row("[[remote]]", request, _pairs(options.node, options.front, request, options.count, order)))
    head = ["balancer", "request", "direct p50 ms", "through it p50 ms", "added p50 ms", "added p99 ms"]
    text = "\n".join(
        [f"{', '.join(machine().values())}; {options.count} pairs, seed {options.seed}", "", *table(head, rows)]
    )
    write([dict(zip(head, row, strict=True)) for row in rows], text, options.out)
