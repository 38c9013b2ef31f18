"""Fuzz tests of messages between frontend and workers: any is accepted or dropped, and the next request is answered."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from ipc import bind
from runtime.serving.frontend_link import FrontendLink
from runtime.serving.kv.block_events import BlockEvents
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.messages import (
    Cached,
    Failed,
    Hello,
    ListCached,
    Report,
    Retrieved,
    Tokens,
    Welcome,
    encode,
)
from tests.frontend.fake_workers import run, unique_endpoint
from tests.frontend.link_harness import running_link
from tests.fuzz.budget import fuzzed
from tests.fuzz.peers import VALUES, WORDS, fits

Link = tuple[FrontendLink, Any, bytes]
ME = Hello("prefill", "prefill-0", 1, 4711, 4, 2048, "")
TO_FRONTEND = [
    ME,
    Hello("decode", "decode-0", 1, 4711, 4, 2048, "ipc://@x"),
    Report("prefill-0", 1, 77, 0, 0, 4),
    Cached("prefill-0", 1, 1, True, bytes(32), bytes(16)),
    Tokens("r0", "text", (5,), "stop", prompt_token_ids=(1,)),
    Failed("r0", "internal_error", "it broke"),
    Retrieved("r0", ()),
]


@st.composite
def messages(draw: st.DrawFn, good: list[Any]) -> list[bytes]:
    """Draw frames: a message with a field or two changed, truncated or extended, or anything."""
    fields = msgspec.msgpack.decode(encode(draw(st.sampled_from(good))))
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
        fields[name] = draw((VALUES | WORDS | st.integers(0, 9)).filter(fits))
    message = msgspec.msgpack.encode(fields)
    match draw(st.integers(0, 5)):
        case 0:
            at = draw(st.integers(0, len(message)))
            message = message[:at] + draw(st.binary(max_size=9)) + message[at + draw(st.integers(0, 9)) :]
        case 1:
            message = draw(st.binary(max_size=60))
        case 2:
            return [message, draw(st.binary(max_size=9))]
        case 3:
            message = b"\x91" * draw(st.integers(1, 5000)) + message
    return [message]


@fuzzed(0.5)
@given(said=st.lists(messages(TO_FRONTEND), min_size=1, max_size=8))
def test_any_message_to_the_frontend_is_accepted_or_dropped(said: list[list[bytes]]) -> None:
    async def saying() -> None:
        async with running_link() as harness:
            prefill, decode = await harness.worker("prefill", "p"), await harness.worker("decode", "d")
            hostile = await harness.worker("prefill", "prefill-0")
            for frames in said:
                await hostile.send_raw(*frames)
            for worker in (prefill, decode):
                await worker.report(77)
                await worker.settle()
            await hostile.send(Report("p", 9, 0, 0, 0, 0))  # earlier messages have been received when this one has
            await prefill.settle()
            assert len(harness.link.requests) == 0

    run(saying())


@fuzzed()
@given(frames=messages([Welcome(77), ListCached()]))
def test_any_message_to_a_worker_is_accepted_or_dropped(
    link: tuple[FrontendLink, Any, bytes], frames: list[bytes]
) -> None:
    worker, frontend, identity = link
    frontend.send_multipart([identity, *frames])
    epoch = worker.frontend_epoch + 1 if worker.frontend_epoch < 1 << 62 else 1
    frontend.send_multipart([identity, encode(Welcome(epoch))])
    while worker.frontend_epoch != epoch:
        worker.socket.poll(1000)
        list(worker.receive())


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    address = unique_endpoint()
    frontend = bind(zmq.ROUTER, address, max_message_bytes=1 << 20)
    worker = FrontendLink(address, ME, BlockEvents(BlockManager(1, 1, b"")))
    identity, _ = frontend.recv_multipart()
    yield worker, frontend, identity
    worker.close()
    frontend.close()
