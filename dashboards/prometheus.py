"""Questions to a Prometheus, over its HTTP API."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping

from dashboards.grafana import Json
from runtime.errors import InvalidRequest, Unavailable

_TIMEOUT_S = 30.0


class Prometheus:
    """The one at `url`, such as http://127.0.0.1:9090."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def ask(self, path: str, parameters: Mapping[str, str]) -> list[Json]:
        """`data.result` of "query" or "query_range". Raises `Unavailable`, and `InvalidRequest` for a wrong query."""
        data = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", data, timeout=_TIMEOUT_S) as answer:
                return list(json.loads(answer.read())["data"]["result"])
        except urllib.error.HTTPError as error:
            with error:
                raise InvalidRequest(
                    f"{parameters.get('query')}: {error.read(1000).decode(errors='replace')}"
                ) from error
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            raise Unavailable(f"no answer from a Prometheus at {self._url}: {error}") from error
