"""Writing to a node's live collections: over its HTTP, because its frontend is their one writer."""

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from runtime.errors import InvalidRequest, TrinityError, Unavailable, error_from_code

_TIMEOUT_S = 60.0


class WriteClient:
    """`url`: where the node's HTTP is now. `key`: an API key, "" where the node has none."""

    def __init__(self, url: Callable[[], str], key: str = "") -> None:
        self._url, self._key = url, key

    def upsert(self, collection: str, documents: Sequence[Mapping[str, Any]]) -> int:
        """As `SearchClient.upsert`."""
        if isinstance(documents, Mapping | str):
            raise InvalidRequest("documents is one; a list of them is needed", "documents")
        return self._ask("PUT", collection, {"documents": list(documents)})

    def delete(self, collection: str, ids: Sequence[str] | None, wanted: Mapping[str, Any] | None) -> int:
        """As `SearchClient.delete`."""
        if isinstance(ids, str):
            raise InvalidRequest("ids is a string; a list of them is needed", "ids")
        asked = {"ids": None if ids is None else list(ids), "filter": wanted}
        return self._ask("DELETE", collection, {name: value for name, value in asked.items() if value is not None})

    def _ask(self, method: str, collection: str, body: Mapping[str, Any]) -> int:
        try:
            content = json.dumps(body, default=_plain, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"this cannot be sent as JSON: {error}") from error
        status, answer = self._sent(method, f"/v1/collections/{quote(collection, safe='')}/documents", content)
        try:
            told = json.loads(answer)
            if status == 200:
                return int(told["count"])
            raised: TrinityError = error_from_code(str(told["error"]["code"]), str(told["error"]["message"]))
        except (ValueError, KeyError, TypeError):
            raised = Unavailable(f"the node answered with status {status}: {answer[:200]!r}")
        raise raised

    def _sent(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self._url())
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"no answer from the node: {error!r}; whether it was stored is not known") from error
        finally:
            connection.close()


def _plain(value: object) -> object:
    """What JSON has no word for, of numpy's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing that a document has")
