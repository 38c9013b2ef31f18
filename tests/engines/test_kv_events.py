"""KV events of model servers: routing by what they publish, and by what was sent to them when that is incomplete."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from runtime.engines.event_endpoints import EventEndpoints
from runtime.engines.openai.capabilities import Capabilities
from runtime.engines.openai.kv_events import SILENT_NS, TIER_SHARE, ServerBlocks, follow
from runtime.engines.openai.load_balancer import Backend, LoadBalancer
from runtime.engines.openai.server import Server
from runtime.engines.openai.transfer import servers_of
from runtime.node.engine_config import OpenAiSection
from runtime.serving.frontend.cached_blocks import MOST_KEYS, PrefixKeys
from runtime.serving.frontend.choice import BLOCK_TOKENS, prefix_blocks
from runtime.serving.messages import Tokens
from tests.clock import Clock
from tests.engines.engine_harness import read_answer, running_engine
from tests.engines.fake_openai import Behaviour

SIZE = 16
PROMPT = list(range(BLOCK_TOKENS * 4))
PREFIX = prefix_blocks(PROMPT)


def stored(tokens: Sequence[int], before: Any = None, first: int = 0, **fields: Any) -> dict[str, Any]:
    """The event of a server that has cached these tokens' blocks, whose hashes are `first` and those that follow."""
    hashes = list(range(first, first + len(tokens) // SIZE))
    found = {"block_hashes": hashes, "parent_block_hash": before, "token_ids": list(tokens), "block_size": SIZE}
    return {"type": "BlockStored", **found, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}


def removed(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def frames(number: int, *events: Any) -> list[bytes]:
    return [b"", number.to_bytes(8), msgspec.msgpack.encode([12.5, events, 0])]


def following(*batches: Sequence[Any], clock: Clock | None = None) -> ServerBlocks:
    """Return the account of a server that has published these batches."""
    view = ServerBlocks(clock or Clock())
    for number, events in enumerate(batches):
        assert not view.apply(frames(number, *events))
    view.learn(PREFIX, len(PROMPT) / BLOCK_TOKENS, PROMPT)
    return view


def saved(view: ServerBlocks) -> float:
    return view.saved(PREFIX, lambda block: False)


def test_blocks_count_from_their_fill_to_their_removal() -> None:
    view = following([stored(PROMPT)])
    assert view.current
    assert saved(view) == 4.0
    view.apply(frames(1, removed(7, 6)))
    assert saved(view) == 3.0
    view.apply(frames(2, stored(PROMPT[-2 * SIZE :], before=5, first=6)))
    assert saved(view) == 4.0
    view.apply(frames(3, {"type": "AllBlocksCleared"}))
    assert (saved(view), len(view)) == (0.0, 0)


def test_events_as_lists_and_hashes_as_bytes_are_understood_too() -> None:
    names = [b"%032d" % number for number in range(8)]
    view = following([["BlockStored", names, None, PROMPT, SIZE, None, "GPU"]])
    assert saved(view) == 4.0
    view.apply(frames(1, ["BlockRemoved", names[4:], "GPU"]))
    assert saved(view) == 2.0


def test_a_block_that_the_server_has_offloaded_counts_less() -> None:
    view = following([stored(PROMPT), stored(PROMPT, medium="CPU"), removed(*range(4, 8))])
    assert saved(view) == 2.0 + 2 * TIER_SHARE
    view.apply(frames(1, removed(*range(8), medium="CPU")))
    assert saved(view) == 2.0


@pytest.mark.parametrize(
    "event",
    [
        stored(PROMPT, lora_id=3),
        stored(PROMPT, extra_keys=[("salt",)] + [None] * 7),
        stored(PROMPT, group_idx=1),
        stored(PROMPT, before=99),
    ],
    ids=["adapter", "salt", "another group", "unknown predecessor"],
)
def test_blocks_that_other_prompts_cannot_share_do_not_count(event: dict[str, Any]) -> None:
    assert saved(following([event])) == 0.0


def test_after_a_gap_the_account_is_void_until_the_server_publishes_from_the_start() -> None:
    view = following([stored(PROMPT)])
    late = frames(2, removed(0))
    assert view.apply(late), "message 1 is missing"
    assert not view.current
    assert not view.apply(late, last=True)
    assert not view.current
    assert len(view) == 0
    view.apply(frames(3, stored(PROMPT)))
    assert not view.current
    view.apply(frames(0, stored(PROMPT)))  # a new process
    assert view.current
    assert saved(view) == 4.0


def test_repeated_messages_close_a_gap_and_are_applied_once() -> None:
    view = following([stored(PROMPT)])
    assert view.apply(frames(3, stored(PROMPT[-2 * SIZE :], before=5, first=6)))
    assert view.next_number == 1
    for number, event in ((1, removed(7)), (2, removed(6)), (3, stored(PROMPT[-2 * SIZE :], before=5, first=6))):
        view.apply(frames(number, event), repeated=True)
    view.apply(frames(3, removed(0)), last=True)  # that which was held back
    assert view.current
    assert saved(view) == 4.0


def test_a_restart_whose_first_messages_were_missed_is_repeated_from_the_start() -> None:
    view = following([stored(PROMPT)], [removed(7)], [removed(6)])
    assert view.apply(frames(1, stored(PROMPT)))
    assert view.next_number == 0


def test_a_server_that_publishes_nothing_of_a_prompt_is_not_believed_until_it_publishes_again() -> None:
    clock = Clock()
    view = following([stored(PROMPT)], clock=clock)
    view.expect(PROMPT)
    clock.advance(60)
    assert view.current, "it has published them"
    view.apply(frames(1, removed(*range(8))))
    view.expect(PROMPT)
    clock.advance(SILENT_NS / 1e9)
    assert view.current
    clock.advance(1)
    assert not view.current
    view.apply(frames(2, stored(PROMPT)))
    assert view.current


HOSTILE: list[Any] = [
    b"",
    b"\xc1",
    b"\x91" * 5000,
    msgspec.msgpack.encode({"events": []}),
    *(
        msgspec.msgpack.encode([0, [event]])
        for event in (
            7,
            [],
            ["Unknown"],
            stored(PROMPT, block_size=0),
            stored(PROMPT, block_size=1 << 40),
            stored(PROMPT, token_ids=PROMPT[:-1]),
            stored([*PROMPT[:-1], -1]),
            stored([*PROMPT[:-1], 1 << 40]),
            stored(PROMPT, token_ids="x" * len(PROMPT)),
            stored(PROMPT, block_hashes=[[1]] * 8),
            stored(PROMPT, block_hashes=[bytes(65)] * 8),
            stored(PROMPT, parent_block_hash=1.5),
            {"type": "BlockStored"},
        )
    ),
]


@pytest.mark.parametrize("payload", HOSTILE)
def test_a_malformed_message_voids_the_account(payload: bytes) -> None:
    view = following([stored(PROMPT)])
    assert not view.apply([b"", (1).to_bytes(8), payload])
    assert (view.current, len(view), view.malformed) == (False, 0, 1)


def test_a_message_with_more_blocks_than_are_remembered_is_malformed() -> None:
    view, many = following([stored(PROMPT)]), MOST_KEYS + 1
    view.apply(frames(1, stored([1] * many, block_hashes=[7] * many, block_size=1)))
    assert (view.current, len(view), view.malformed) == (False, 0, 1)


@given(st.lists(st.binary(max_size=20), max_size=5), st.binary(max_size=60))
def test_any_bytes_are_accepted_or_dropped(parts: list[bytes], payload: bytes) -> None:
    view = following([stored(PROMPT)])
    view.apply(parts)
    view.apply([b"", (1).to_bytes(8), payload])


def test_a_server_with_more_blocks_than_are_remembered_is_judged_by_what_was_sent_to_it() -> None:
    view = ServerBlocks(Clock())
    many = 4096
    for number in range(MOST_KEYS // many + 1):
        tokens = [number] * (many * SIZE)
        view.apply(frames(number, stored(tokens, first=number * many)))
    assert not view.current
    assert len(view) <= MOST_KEYS


def test_a_server_that_gives_one_name_to_block_after_block_takes_no_more_memory() -> None:
    view = ServerBlocks(Clock())
    for number, blocks in enumerate((MOST_KEYS, 1)):
        assert view.current == bool(number)
        view.apply(frames(number, stored([number] * blocks, block_hashes=[7] * blocks, block_size=1)))
    assert not view.current


async def test_requests_go_to_the_server_that_publishes_their_blocks_although_they_were_sent_to_another() -> None:
    clock = Clock()
    endpoints = EventEndpoints("ipc:///nowhere")
    servers = [Server(f"http://{name}/v1", events=endpoints) for name in ("a", "b")]
    balancer = LoadBalancer(servers, lambda server: asyncio.sleep(0, Capabilities()), clock)

    def chosen() -> Backend:
        backend = balancer.choose(lambda capabilities: None, prefix=PREFIX)
        balancer.release(backend)
        return backend

    await balancer.check_all()
    first, other = balancer.backends
    for backend in balancer.backends:
        assert backend.cached is not None
        backend.cached.apply(frames(0, stored([9] * SIZE, first=100)))
    balancer.remember(first, PREFIX)
    balancer.computed(first, PREFIX, 4.0, PROMPT)
    assert other.cached is not None
    other.cached.apply(frames(1, stored(PROMPT)))
    assert [chosen() for _ in range(3)] == [other] * 3
    other.cached.apply(frames(9, stored(PROMPT)), last=True)  # a gap
    assert first.cached is not None
    first.cached.apply(frames(9), last=True)
    assert [chosen() for _ in range(3)] == [first] * 3, "by what was sent to it"


def test_a_prompts_blocks_are_learned_once_for_all_servers_with_blocks_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned: list[int] = []
    learn = PrefixKeys.learn

    def counted(keys: PrefixKeys, prefix: Any, length: float, tokens: Any, block_tokens: int, root: bytes) -> None:
        learned.append(block_tokens)
        learn(keys, prefix, length, tokens, block_tokens, root)

    monkeypatch.setattr(PrefixKeys, "learn", counted)
    servers = [Server(f"http://{name}/v1", events=EventEndpoints("ipc:///nowhere")) for name in "abc"]
    balancer = LoadBalancer(servers, lambda server: asyncio.sleep(0, Capabilities()), Clock())
    for backend, size in zip(balancer.backends, (16, 16, 32), strict=True):
        assert backend.cached is not None
        hashes = list(range(len(PROMPT) // size))
        backend.cached.apply(frames(0, stored(PROMPT, block_hashes=hashes, block_size=size)))
    balancer.computed(balancer.backends[0], PREFIX, len(PROMPT) / BLOCK_TOKENS, PROMPT)
    assert learned == [16, 32]
    assert [saved(backend.cached) for backend in balancer.backends if backend.cached is not None] == [4.0] * 3


async def test_the_token_ids_of_an_answer_show_where_its_prompts_blocks_are() -> None:
    text = "What holds for one prompt holds for the next that begins with it. " * 8
    async with running_engine(Behaviour(), Behaviour()) as harness:
        views = [ServerBlocks(harness.clock) for _ in harness.fakes]
        for backend, view in zip(harness.engine.balancer.backends, views, strict=True):
            backend.cached = view
            view.apply(frames(0, stored([9] * SIZE, first=900)))
        answer = await read_answer(harness.complete(text))
        (chosen,) = (number for number, fake in enumerate(harness.fakes) if fake.generations())
        prompt = next(piece.prompt_token_ids for piece in answer.pieces if isinstance(piece, Tokens))
        whole = prompt[: len(prompt) // SIZE * SIZE]
        views[1 - chosen].apply(frames(1, stored(whole)))
        for _ in range(2):
            await read_answer(harness.complete(text))
        assert [len(harness.fakes[number].generations()) for number in (chosen, 1 - chosen)] == [1, 2]


@pytest.mark.parametrize(
    ("more", "endpoints"),
    [
        ({"kv_events": ["tcp://a:5557"]}, [EventEndpoints("tcp://a:5557"), None]),
        (
            {"kv_events": ["tcp://a:1", "ipc:///run/b"], "prefill": {"url": "http://b/v1"}}
            | {"kv_events_replay": ["tcp://a:2", "ipc:///run/c"]},
            [EventEndpoints("tcp://a:1", "tcp://a:2"), EventEndpoints("ipc:///run/b", "ipc:///run/c")],
        ),
        ({}, [None]),
    ],
)
def test_the_endpoints_belong_to_the_servers_in_their_order(
    more: dict[str, Any], endpoints: list[EventEndpoints | None]
) -> None:
    section = msgspec.convert({"engine": "openai", "name": "m", "url": "http://a/v1"} | more, OpenAiSection)
    found = [server.events for server in servers_of(section, "")]
    assert found == endpoints[: len(found)]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"kv_events": ["tcp://a:1", "tcp://b:1"]}, "kv_events has 2 endpoints for 1 servers"),
        (
            {"kv_events": ["tcp://a:1"], "kv_events_replay": ["tcp://a:1", "tcp://b:1"]},
            "kv_events_replay has 2 endpoints",
        ),
        ({"kv_events_replay": ["tcp://a:1"]}, "set kv_events, too"),
        ({"kv_events": ["tcp://a:65536"]}, "a port is from 1 to 65535"),
        ({"kv_events": [f"ipc:///{'x' * 107}"]}, "the path has 108 bytes, the limit is 107"),
        ({"kv_events": ["tcp://*:5557"]}, r"tcp://\*:5557: .*give the host to connect to"),
        ({"kv_events": ["http://a:1"]}, "Expected `str` matching"),
        ({"kv_events": ["tcp://a"]}, "Expected `str` matching"),
    ],
)
def test_endpoints_that_cannot_be_read_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert({"engine": "openai", "name": "m", "url": "http://a/v1"} | more, OpenAiSection)


@pytest.mark.parametrize("topic", [[b""], []], ids=["vLLM", "SGLang"])
async def test_a_reader_receives_messages_and_has_missed_ones_repeated(tmp_path: Path, topic: list[bytes]) -> None:
    context = zmq.asyncio.Context.instance()
    at = EventEndpoints(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    with context.socket(zmq.XPUB) as publisher, context.socket(zmq.ROUTER) as replayer:
        publisher.bind(at.events)
        replayer.bind(at.replay)
        view = ServerBlocks(Clock())

        async def replay(*messages: list[bytes]) -> int:
            peer, _, start = await replayer.recv_multipart()
            for message in messages:
                await replayer.send_multipart([peer, b"", *topic, *message[1:]])
            await replayer.send_multipart([peer, b"", *topic, (-1).to_bytes(8, signed=True), b""])
            return int.from_bytes(start)

        reading = asyncio.create_task(follow(at, view))
        assert await publisher.recv() == b"\x01"
        assert await replay(frames(0, stored(PROMPT))) == 0
        await publisher.send_multipart(frames(2, removed(6)))
        assert await replay(frames(1, removed(7)), frames(2, removed(6))) == 1
        await publisher.send_multipart(frames(4))
        assert await replay() == 3  # no longer there
        await publisher.send_multipart(frames(6))
        assert await replay() == 0
        assert not view.current
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
