"""Client of a node's write API for collections: HTTP, because the frontend is their only writer."""

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from runtime.errors import InvalidRequest, TrinityError, Unavailable, error_from_code

_TIMEOUT_S = 60.0


class WriteClient:
    """Writes documents of collections. `url`: returns the node's URL. `key`: API key, "" for none."""

    def __init__(self, url: Callable[[], str], key: str = "") -> None:
        self._url, self._key = url, key

    def upsert(self, collection: str, documents: Sequence[Mapping[str, Any]]) -> int:
        """As `SearchClient.upsert`."""
        if isinstance(documents, Mapping | str):
            raise InvalidRequest("documents must be a list of documents", "documents")
        return self._request("PUT", collection, {"documents": list(documents)})

    def delete(self, collection: str, ids: Sequence[str] | None, filter: Mapping[str, Any] | None) -> int:
        """As `SearchClient.delete`."""
        if isinstance(ids, str):
            raise InvalidRequest("ids must be a list of ids, not a string", "ids")
        body = {"ids": None if ids is None else list(ids), "filter": filter}
        return self._request("DELETE", collection, {name: value for name, value in body.items() if value is not None})

    def _request(self, method: str, collection: str, body: Mapping[str, Any]) -> int:
        try:
            content = json.dumps(body, default=_json_default, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the documents cannot be encoded as JSON: {error}") from error
        status, response = self._send(method, f"/v1/collections/{quote(collection, safe='')}/documents", content)
        try:
            decoded = json.loads(response)
            if status == 200:
                return int(decoded["count"])
            failure: TrinityError = error_from_code(str(decoded["error"]["code"]), str(decoded["error"]["message"]))
        except (ValueError, KeyError, TypeError):
            failure = Unavailable(f"the node responded with status {status}: {response[:200]!r}")
        raise failure

    def _send(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self._url())
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"no response from the node: {error!r}; the write may have happened") from error
        finally:
            connection.close()


def _json_default(value: object) -> object:
    """Encode numpy arrays and scalars."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not allowed in a document")
