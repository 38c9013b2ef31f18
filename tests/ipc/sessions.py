"""Helpers of the session tests: queries, results and forged descriptors."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ipc import RingClient, SearchSpec
from ipc.ring.descriptors import PARAMETERS, REQUEST_HEADER
from ipc.server.client_table import AttachedClient
from tests.ipc.arenas import span
from tests.ipc.ring_server import RingServer

DIM = 8
SLOTS = 4


def vector(seed: int = 0, dim: int = DIM) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(dim, np.float32)


def ask(client: RingClient, seed: int = 0, **changes: Any) -> int:
    one, spec = vector(seed), SearchSpec(**{"collection": "docs", "k": 2, **changes})
    return client.submit(span(one) if client.takes_in_place(spec) else one, spec)


def answer(server: RingServer, limit: int = 256) -> int:
    """Answer waiting requests with their vectors' first k values. Return how many."""
    requests = server.receive(limit)
    for request in requests:
        k = request.spec.k
        server.publish(request.client, request.request_id, "ok", np.arange(k), request.vector[:k])
    return len(requests)


def void(_: object) -> None:
    return None


def place_of(server: RingServer, client: int) -> AttachedClient:
    """Return the place of a client's session in the server's table."""
    return next(place for place in server.client_table.clients if place is not None and place.handle == client)


def forge_requests(client: RingClient, ids: Any, **changes: int) -> None:
    """Write descriptors that `submit` would reject."""
    ring = client.attachment.requests
    fields = {
        "epoch": 5,
        "kind": 0,
        "stage": 0,
        "collection": 0,
        "k": 1,
        "filter": 0,
        "top_m": 8,
        "width": 1,
        "patience": 0,
    }
    fields = {**fields, "dim": DIM, "flow": 0, "deadline": 0, **changes}
    deadline = fields.pop("deadline")
    for request_id in ids:
        offset = ring.header_offsets[ring.loan()]
        REQUEST_HEADER.pack_into(ring.view, offset, request_id, deadline, 0, PARAMETERS.pack(*fields.values()))
        client.pending[request_id] = 0
        ring.send()
