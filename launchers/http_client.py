"""HTTP client of the node's own commands: JSON requests; JSON or server-sent events in response."""

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from runtime.errors import TrinityError, Unavailable, error_from_code

Json = dict[str, Any]


def get(url: str, path: str, key: str = "") -> bytes:
    """GET a body, with an API key if given. Raises the `TrinityError` that the node returned."""
    with _response(url, "GET", path, None, 10.0, key) as response:
        return response.read()


def post(url: str, path: str, body: Json, timeout_s: float = 600.0) -> Json:
    """POST a JSON body and return the JSON response. Raises the `TrinityError` that the node returned."""
    with _response(url, "POST", path, body, timeout_s) as response:
        return dict(json.loads(response.read()))


def stream(url: str, path: str, body: Json, timeout_s: float = 600.0) -> Generator[Json, None, None]:
    """Iterate over the events of a streamed response. Raises the `TrinityError` that ended it, if any."""
    with _response(url, "POST", path, {**body, "stream": True}, timeout_s) as response:
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise _error(response.status, line[len(b"data: ") :])
            yield event


@contextmanager
def _response(
    url: str, method: str, path: str, body: Json | None, timeout_s: float, key: str = ""
) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request(method, path, data, headers)
        with connection.getresponse() as response:
            if response.status != 200:
                raise _error(response.status, response.read())
            yield response
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a key that is not a valid header
        raise Unavailable(f"no answer from {url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _error(status: int, body: bytes) -> TrinityError:
    try:
        error = json.loads(body)["error"]
        return error_from_code(str(error["code"]), str(error["message"]), error.get("param"))
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"unexpected status {status} from the node: {body[:200]!r}")
