"""Tests that malformed messages are all counted, and logged at a limited rate."""

import logging

import pytest
import zmq

from ipc.endpoints import bind, new_token, private_endpoint
from runtime.serving.frontend_link import FrontendLink
from runtime.serving.kv.block_events import BlockEvents
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.malformed import MalformedMessages
from runtime.serving.messages import Hello

log = logging.getLogger("tests.malformed")


def test_each_is_counted_and_one_line_every_ten_seconds_summarises_them(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100
    messages = MalformedMessages(log, lambda: now_s * 10**9)
    for second in range(100, 125):
        now_s = second
        for number in range(1000):
            messages.record("worker decode-0", f"odd at {second}.{number}")
    assert messages.count == 25_000
    assert [record.getMessage() for record in caplog.records] == [
        "dropped a malformed message from worker decode-0: odd at 100.0",
        "dropped a malformed message from worker decode-0: odd at 110.0 (and 9999 more since the last such line)",
        "dropped a malformed message from worker decode-0: odd at 120.0 (and 9999 more since the last such line)",
    ]


def test_a_frontends_malformed_messages_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    address = private_endpoint(new_token(), "frontend")
    frontend = bind(zmq.ROUTER, address, max_message_bytes=1 << 20)
    link = FrontendLink(address, Hello("prefill", "prefill-0", 1, 1, 4, 100), BlockEvents(BlockManager(1, 1, b"")))
    try:
        identity = frontend.recv_multipart()[0]
        for _ in range(500):
            frontend.send_multipart([identity, b"nonsense"])
        while link.malformed.count < 500:
            link.socket.poll(1000)
            assert list(link.receive()) == []
        assert len(caplog.records) == 1
    finally:
        link.close()
        frontend.close()
