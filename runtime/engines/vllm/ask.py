"""/health and /metrics of an instance, over its socket."""

import http.client
import re
import socket

_MOST_BYTES = 4 << 20
_UNFINISHED = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(path: str, what: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of GET `what` at the socket `path`. Raises `OSError` or `HTTPException` without an answer."""
    connection = _Connection(path, timeout_s)
    try:
        connection.request("GET", what)
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES)
    finally:
        connection.close()


def unfinished(metrics: str) -> int:
    """Requests that run or wait there, by its metrics."""
    return sum(int(float(count)) for count in _UNFINISHED.findall(metrics))
