"""Paired latency measurement: the same requests directly and through an intermediary, in random order."""

import http.client
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

HEAD = ["", "request", "direct p50 ms", "through it p50 ms", "added p50 ms", "direct p99 ms", "through it p99 ms"]
_WARM = 20


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: dict[str, Any] | None = None


@dataclass(frozen=True)
class Pair:
    """Seconds and responses of one request, direct and through the intermediary."""

    seconds: tuple[float, float]
    answers: tuple[dict[str, Any], dict[str, Any]]


def pairs(direct: str, through: str, requests: Sequence[Request], order: random.Random) -> list[Pair]:
    """Send each request on both paths, over one persistent connection each, after a warm-up."""
    connections = [http.client.HTTPConnection(urlsplit(url).netloc, timeout=60) for url in (direct, through)]
    found = []
    for number, request in enumerate([*requests[:_WARM], *requests], -min(_WARM, len(requests))):
        took: dict[int, tuple[float, dict[str, Any]]] = {}
        for path in order.sample((0, 1), 2):
            took[path] = _send(connections[path], request)
        if number >= 0:
            found.append(Pair((took[0][0], took[1][0]), (took[0][1], took[1][1])))
    for connection in connections:
        connection.close()
    return found


def row(name: str, request: str, found: Sequence[Pair]) -> list[str]:
    """Return a row of a table with `HEAD`."""
    direct, through = zip(*(pair.seconds for pair in found), strict=True)
    added = median(after - before for before, after in zip(direct, through, strict=True))
    p99 = [quantiles(times, n=100)[-1] for times in (direct, through)]
    return [name, request, *(f"{1e3 * value:.2f}" for value in (median(direct), median(through), added, *p99))]


def _send(connection: http.client.HTTPConnection, request: Request) -> tuple[float, dict[str, Any]]:
    """Return the seconds and the response. Exits on an error response."""
    body = json.dumps(request.body) if request.body else None
    begin = time.perf_counter()
    connection.request(request.method, request.path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    took = time.perf_counter() - begin
    if answer.status != 200:
        raise SystemExit(f"{request.method} {request.path}: {answer.status} {content[:300]!r}")
    return took, json.loads(content)
