"""The node's own commands read streamed responses, whatever their texts contain."""

import httpx
import msgspec
import pytest

from launchers.http_client import get, stream
from runtime.errors import Overloaded, Unauthorized
from tests.retrieval.model_server import ModelServer, serving

TEXTS = ["a\u2028b\u2029c\x85d", "e\x0bf\x0cg\x1c", "", "h\r\ni"]


def test_a_streamed_text_may_contain_every_line_separator_of_unicode() -> None:
    with serving(ModelServer()) as server:
        events = b"".join(b"data: " + msgspec.json.encode({"text": text}) + b"\n\n" for text in TEXTS)
        server.script = [(200, {}, b": comment\n\n" + events + b"data: [DONE]\n\n")]
        assert [event["text"] for event in stream(server.url, "/models", {})] == TEXTS


def test_an_error_in_a_stream_ends_it() -> None:
    with serving(ModelServer()) as server:
        error = {"error": {"message": "try\u2028later", "code": "overloaded", "param": None}}
        server.script = [(200, {}, b'data: {"text": "a"}\n\ndata: ' + msgspec.json.encode(error) + b"\n\n")]
        events = stream(server.url, "/models", {})
        assert next(events) == {"text": "a"}
        with pytest.raises(Overloaded, match="try\u2028later"):
            next(events)


@pytest.mark.parametrize(("key", "said"), [("", "missing"), ("k", "wrong")])
def test_a_command_without_the_right_key_is_told_the_option_that_sets_it(
    key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"error": {"message": "send the header", "code": "invalid_api_key", "param": None}}
    node = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(401, json=error)))
    monkeypatch.setattr(httpx, "stream", lambda *request, trust_env, **options: node.stream(*request, **options))
    with pytest.raises(Unauthorized, match=f"the API key is {said}: give --key, or TRINITY_API_KEY"):
        get("http://node", "/models", key)
