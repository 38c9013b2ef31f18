"""What HTTP clients see of fixed requests, compared with the recorded responses: status, headers and body.

`python -m tests.frontend.test_transcripts` records them anew, after a change of what clients see.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.cluster import Cluster

RECORDED = Path(__file__).parent / "transcripts"
_UNRECORDED_HEADERS = {"date", "content-length"}  # the length is that of the ids, too
_VARYING = (
    (re.compile(r"\b(chatcmpl|cmpl|req|ret)-[0-9a-f]+-[0-9]+"), r"\1-…"),
    (re.compile(r'"(created|[a-z0-9_]*(?:ttft|tpot|e2e|decode|stall))":[0-9.e-]+'), r'"\1":…'),
    (re.compile(r"< allow: HEAD, GET"), "< allow: GET, HEAD"),  # a set
)
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say=3"}], "max_tokens": 9}
_RETRIEVAL = {"collection": "docs", "k": 2}
_VECTOR = [0.5, -0.25, 1.0, 0.0]


def _asked(text: str, **fields: Any) -> dict[str, Any]:
    return {**_CHAT, "messages": [{"role": "user", "content": text}], **fields}


_CASES: dict[str, tuple[str, str, Any]] = {
    "models": ("GET", "/v1/models", None),
    "one-model": ("GET", "/v1/models/tiny", None),
    "unknown-model": ("GET", "/v1/models/big/one", None),
    "health": ("GET", "/health", None),
    "unknown-route": ("GET", "/v1/nothing", None),
    "wrong-method": ("DELETE", "/v1/models", None),
    "chat": ("POST", "/v1/chat/completions", _CHAT),
    "chat-streamed": (
        "POST", "/v1/chat/completions", {**_CHAT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat-retrieval": ("POST", "/v1/chat/completions", _asked("say=2", retrieval=_RETRIEVAL)),
    "chat-only-collection": ("POST", "/v1/chat/completions", _asked("say=1", retrieval={"k": 1})),
    "completion-only-collection": (
        "POST", "/v1/completions", {"model": "tiny", "prompt": "say=1", "max_tokens": 9, "retrieval": {"k": 1}},
    ),
    "chat-probe-streamed": (
        "POST", "/v1/chat/completions",
        _asked("say=4 probe=2", stream=True, retrieval={**_RETRIEVAL, "every_tokens": 2}),
    ),
    "chat-cut": ("POST", "/v1/chat/completions", _asked("say=9", max_tokens=2)),
    "chat-stop": ("POST", "/v1/chat/completions", _asked("say=9", stop=["w3"])),
    "chat-fails": ("POST", "/v1/chat/completions", _asked("say=4 fail=2")),
    "chat-fails-streamed": ("POST", "/v1/chat/completions", _asked("say=4 fail=2", stream=True)),
    "chat-refused-streamed": (
        "POST", "/v1/chat/completions", _asked("refuse=context_length_exceeded", stream=True),
    ),
    "chat-refused": ("POST", "/v1/chat/completions", _asked("refuse=context_length_exceeded")),
    "completion": ("POST", "/v1/completions", {"model": "tiny", "prompt": "say=2", "max_tokens": 9}),
    "completion-streamed": (
        "POST", "/v1/completions", {"model": "tiny", "prompt": "say=2", "max_tokens": 9, "stream": True},
    ),
    "retrieval": ("POST", "/v1/retrieval", {"collection": "docs", "vector": _VECTOR, "k": 2}),
    "retrieval-text": ("POST", "/v1/retrieval", {"collection": "docs", "query": "with", "k": 1}),
    "retrieval-dimension": ("POST", "/v1/retrieval", {"collection": "docs", "vector": [1.0]}),
    "retrieval-unknown-collection": ("POST", "/v1/retrieval", {"collection": "dosc", "vector": _VECTOR}),
    "retrieval-k": ("POST", "/v1/retrieval", {"collection": "docs", "vector": _VECTOR, "k": 0}),
    "no-json": ("POST", "/v1/chat/completions", b"{"),
    "unknown-field": ("POST", "/v1/chat/completions", {**_CHAT, "max_token": 3}),
    "unsupported-field": ("POST", "/v1/chat/completions", {**_CHAT, "n": 2}),
    "wrong-type": ("POST", "/v1/chat/completions", {**_CHAT, "temperature": "hot"}),
    "wrong-model": ("POST", "/v1/chat/completions", {**_CHAT, "model": "large"}),
    "no-messages": ("POST", "/v1/chat/completions", {"model": "tiny", "messages": []}),
}  # fmt: skip


def transcript(http: httpx.Client, name: str) -> list[str]:
    """Return a request, and the lines of its response without what differs between runs."""
    method, path, body = _CASES[name]
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.request(method, path, content=content)
    lines = [f"> {method} {path}", f"> {(content or b'').decode()}", f"< {answer.status_code}"]
    lines += sorted(f"< {key}: {value}" for key, value in answer.headers.items() if key not in _UNRECORDED_HEADERS)
    lines += answer.text.splitlines()
    for pattern, replacement in _VARYING:
        lines = [pattern.sub(replacement, line) for line in lines]
    return lines


@pytest.fixture(scope="module")
def cluster(through: Path | None) -> Iterator[Cluster]:
    with Cluster(private=through) as cluster:
        yield cluster


@pytest.mark.parametrize("name", _CASES)
def test_responses_to_fixed_requests_are_the_recorded_ones(http: httpx.Client, name: str) -> None:
    assert transcript(http, name) == (RECORDED / f"{name}.txt").read_text().splitlines()


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    with Cluster() as recording, recording.http() as client:
        for case in _CASES:
            (RECORDED / f"{case}.txt").write_text("\n".join(transcript(client, case)) + "\n")
