"""A light load through a balancer, in which every request is accounted for."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from runtime.testing.background import Background
from runtime.testing.node import Node
from runtime.testing.waiting import eventually

_TIMEOUT_S = 60.0
_STREAM = {"model": "tiny", "prompt": "how does a with statement call __exit__?", "max_tokens": 24, "stream": True}
_WHOLE = {"model": "tiny", "prompt": "what is a decorator?", "max_tokens": 8}
_SEARCH = {"query": "the with statement", "collection": "docs", "k": 3}


@dataclass(frozen=True)
class Outcome:
    """How a request ended. `begun`: its first byte was there; `whole`: so was its last; `error`: what the client saw,
    a code of ours or what its connection died of."""

    kind: str
    begun: bool
    whole: bool
    error: str = ""


@dataclass
class Outcomes:
    """The requests of a load; all of them have one id."""

    request_id: str
    sent: int = 0
    ended: list[Outcome] = field(default_factory=list)

    @property
    def lost(self) -> list[Outcome]:
        return [one for one in self.ended if not one.whole]


@contextmanager
def load(url: str, clients: int = 4) -> Iterator[Outcomes]:
    """Run clients that alternate streams, whole answers and searches until the block ends."""
    outcomes = Outcomes(f"load-{urlsplit(url).port}")

    def ask() -> None:
        requests = [("stream", "/v1/completions", _STREAM), ("whole", "/v1/completions", _WHOLE),
                    ("search", "/v1/retrieval", _SEARCH)]  # fmt: skip
        number = 0
        while not asking.ended.wait(0.1):
            outcomes.sent += 1
            outcomes.ended.append(_ask(url, outcomes.request_id, *requests[number % len(requests)]))
            number += 1

    asking = Background([ask] * clients)
    with asking:
        yield outcomes


def more(outcomes: Outcomes, count: int) -> None:
    """Wait until `count` more requests have ended."""
    wanted = len(outcomes.ended) + count
    eventually(lambda: len(outcomes.ended) >= wanted, 120, f"{count} requests to end")


def takes_part(node: Node, outcomes: Outcomes) -> None:
    """Wait until the balancer of this load has sent the node a request: the node has its trace."""
    trace = f"{node.info.url}/v1/traces/{outcomes.request_id}"
    node.wait(
        lambda: httpx.get(trace, timeout=_TIMEOUT_S, trust_env=False).status_code == 200,
        60,
        "the balancer to send it something",
    )


def _ask(url: str, request_id: str, kind: str, path: str, body: dict[str, Any]) -> Outcome:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    headers, begun = {"Content-Type": "application/json", "X-Request-Id": request_id}, False
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        begun = True
        text = answer.read().decode()
        if answer.status != 200:
            return Outcome(kind, begun=False, whole=False, error=f"{answer.status} {text[:200]}")
        if kind != "stream":
            return Outcome(kind, begun, whole=bool(json.loads(text)))
        if text.endswith("data: [DONE]\n\n"):
            return Outcome(kind, begun, whole=True)
        return Outcome(kind, begun, whole=False, error=f"its stream ended with {text[-200:]!r}")
    except (OSError, http.client.HTTPException) as error:
        return Outcome(kind, begun, whole=False, error=repr(error)[:200])
    finally:
        connection.close()
