"""Request bodies and the error assertion shared by the tests of rejected requests."""

import httpx

from runtime.serving.http.service import Settings

SETTINGS = Settings(model="tiny", collections={"docs": 4}, max_body_bytes=10_000, max_prompt_bytes=2_000, max_k=8)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say=1"}]}
SEARCH = {"collection": "docs", "query": "with"}
COMPLETION = {"model": "tiny", "prompt": "say=1"}


def assert_error(answer: httpx.Response, status: int, code: str, param: str | None = None, message: str = "") -> None:
    """Assert that the answer is this error, in the full format."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert message in error["message"]
    assert "Traceback" not in answer.text
