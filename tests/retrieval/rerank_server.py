"""A fake server of `POST /v1/rerank`."""

from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.retrieval.model_server import ModelServer


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without an answer."""


class RerankModel(ModelServer):
    """Scores texts by their length, as vLLM answers: best first, with the documents."""

    path = "/v1/rerank"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        texts = body["documents"]
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))[: body["top_n"]]
        results = [{"index": n, "document": {"text": texts[n]}, "relevance_score": len(texts[n]) / 8} for n in order]
        usage = {"prompt_tokens": 7, "total_tokens": 7}
        return {"id": "rerank-1", "model": body["model"], "results": results, "usage": usage}

    def hang(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer nothing until the test ends."""
        self.released.wait(60)

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        """Send a response byte by byte, until the client or the test ends."""
        handler.wfile.write(b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n")
        with suppress(OSError):
            while not self.released.wait(0.005):
                handler.wfile.write(b" ")
