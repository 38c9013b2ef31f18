"""HTTP client of the node's own commands: JSON requests; JSON or server-sent events in response."""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from runtime.errors import Unauthorized, Unavailable, error_from_response

Json = dict[str, Any]


def get(url: str, path: str, key: str = "") -> bytes:
    """GET a body, with an API key if given. Raises the `TrinityError` that the node returned."""
    try:
        with _response("GET", url + path, 10.0, key=key) as response:
            return response.read()
    except Unauthorized as error:
        raise Unauthorized(
            f"{url}: the API key is {'wrong' if key else 'missing'}: give --key, or TRINITY_API_KEY"
        ) from error


def post(url: str, path: str, body: Json, timeout_s: float = 600.0) -> Json:
    """POST a JSON body and return the JSON response. Raises the `TrinityError` that the node returned."""
    with _response("POST", url + path, timeout_s, body) as response:
        return dict(json.loads(response.read()))


def stream(url: str, path: str, body: Json, timeout_s: float = 600.0) -> Generator[Json, None, None]:
    """Iterate over the events of a streamed response. Raises the `TrinityError` that ended it, if any."""
    with _response("POST", url + path, timeout_s, {**body, "stream": True}) as response:
        for line in _lines(response):
            data = line.removeprefix(b"data: ")
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise error_from_response(response.status_code, data)
            yield event


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Iterate over the lines of a body. httpx's own also end at U+2028, U+2029 and U+0085, which a JSON string may
    contain."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


@contextmanager
def _response(
    method: str, url: str, timeout_s: float, body: Json | None = None, key: str = ""
) -> Iterator[httpx.Response]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.stream(method, url, json=body, headers=headers, timeout=timeout_s, trust_env=False) as response:
            if response.status_code != 200:
                raise error_from_response(response.status_code, response.read())
            yield response
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # ValueError: a key that is not a valid header
        raise Unavailable(f"no answer from {url}: {type(error).__name__}: {error}") from error
