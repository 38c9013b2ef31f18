"""Routing by what workers say they have cached, and by what was sent to them while that is unknown."""

from collections.abc import Sequence

import pytest

from runtime.serving.frontend.cached_blocks import MOST_KEYS, PrefixKeys, WorkerBlocks
from runtime.serving.frontend.choice import BLOCK_CHARS, prefix_blocks
from runtime.serving.frontend.router import Router, known_prefix
from runtime.serving.kv.block_events import BATCH_KEYS, BlockEvents
from runtime.serving.kv.blocks import BlockManager, block_keys
from runtime.serving.messages import Cached, Generation, Hello, ListCached, Message, Report, Retrieval, Role, Sampling
from tests.clock import Clock
from tests.frontend.link_harness import running_link

BLOCK = 32
IDENTITY = b"model"
TEXT = "The with statement is used to wrap the execution of a block. " * 40


class Node:
    """A router and its workers' block managers. One token is one character, as with the tests' tiny tokenizer."""

    def __init__(self, *names: str, blocks: int = 200, tier: Sequence[bytes] = ()) -> None:
        self.clock = Clock()
        self.router = Router(max_in_flight=100, in_tier=lambda key: key in tier, clock=self.clock)
        self.managers: dict[str, BlockManager] = {}
        self.events: dict[str, BlockEvents] = {}
        for name in names:
            self.start(name, blocks)

    def start(self, name: str, blocks: int = 200, epoch: int = 1) -> None:
        """Start a worker, or its replacement with an empty cache."""
        self.managers[name] = BlockManager(blocks, BLOCK, IDENTITY)
        self.events[name] = BlockEvents(self.managers[name])
        role: Role = "prefill" if name.startswith("p") else "decode"
        self.router.add(Hello(role, name, epoch, 1, 4, 1 << 20, "", BLOCK, blocks, IDENTITY))

    def publish(self, name: str, epoch: int = 1, load_saves: float = 0.0) -> None:
        while batch := self.events[name].take(name, epoch):
            self.router.cached(batch)
        number = self.events[name].number
        report = Report(name, epoch, 1, 0, 0, 4, free_blocks=200, cached_batch=number, load_saves=load_saves)
        self.router.report(report)

    def compute(self, name: str, text: str) -> None:
        """Compute a prompt at a worker, whoever sent it there, and let the router learn its tokens."""
        tokens, manager = list(text.encode()), self.managers[name]
        table = manager.open(tokens)
        manager.grow(table, len(tokens))
        manager.fill(table, tokens, len(tokens))
        manager.close(table)
        self.publish(name)
        self.router.learn(known_prefix(Generation(Sampling(1), 0, 1, prompt=text)), tokens, b"")

    def prefill_of(self, text: str) -> str:
        placement = self.router.place(prefix_blocks(text))
        self.router.finished(placement, prefilled=False)
        return placement.prefill


def test_a_prompt_goes_to_the_worker_that_holds_its_blocks_although_it_was_sent_to_another() -> None:
    node = Node("p0", "p1", "d0")
    sent = node.prefill_of(TEXT)
    other = "p1" if sent == "p0" else "p0"
    node.publish(sent)  # it has an empty cache: the request was cancelled, say
    node.compute(other, TEXT)
    assert {node.prefill_of(TEXT) for _ in range(3)} == {other}


def test_a_prompt_is_not_sent_back_to_a_worker_that_evicted_it() -> None:
    node = Node("p0", "p1", "d0", blocks=len(TEXT) // BLOCK + 1)
    sent = node.prefill_of(TEXT)
    other = "p1" if sent == "p0" else "p0"
    node.publish(other)
    node.compute(sent, TEXT)
    assert node.prefill_of(TEXT + "and more") == sent
    node.compute(other, TEXT)
    node.compute(sent, ("Another text fills the whole cache of that worker. " * 60)[: len(TEXT)])
    assert [node.prefill_of(TEXT) for _ in range(2)] == [other] * 2


def test_the_replacement_of_a_worker_has_nothing_cached_and_the_blocks_of_its_predecessor_do_not_count() -> None:
    node = Node("p0", "p1", "d0")
    node.compute("p0", TEXT)
    node.publish("p1")
    old = node.events["p0"]
    node.start("p0", epoch=2)
    node.publish("p0", epoch=2)
    old.restart()
    late = old.take("p0", 1)
    assert late is not None
    node.router.cached(late)  # of the process that died
    (overlap,) = [one.overlap(prefix_blocks(TEXT)) for one in node.router.workers() if one.hello.worker == "p0"]
    assert overlap == 0.0


def test_prompts_on_their_way_to_a_worker_count_before_they_are_computed() -> None:
    node = Node("p0", "p1", "d0")
    for name in node.events:
        node.publish(name)
    first = node.router.place(prefix_blocks(TEXT))
    node.router.prefilled(first)
    assert node.router.place(prefix_blocks(TEXT)).prefill == first.prefill


def test_a_block_of_the_host_tier_counts_as_much_as_loading_it_saves() -> None:
    prefix, keys = prefix_blocks(TEXT), list(block_keys(list(TEXT.encode()), BLOCK, IDENTITY))
    node = Node("p0", "p1", "d0", tier=keys)
    node.compute("p0", TEXT)
    for saves, expected in ((0.75, 0.75), (0.0, 0.0), (float("nan"), 0.0), (-3.0, 0.0), (7.0, 1.0)):
        node.publish("p1", load_saves=saves)
        overlaps = {one.hello.worker: one.overlap(prefix) for one in node.router.workers()}
        assert (overlaps["p0"], overlaps["p1"]) == (1.0, expected)


def test_the_host_tier_is_asked_once_a_request_for_a_block_that_no_worker_has() -> None:
    asked: list[bytes] = []

    def in_tier(key: bytes) -> bool:
        asked.append(key)
        return True

    node = Node()
    node.router = Router(max_in_flight=100, in_tier=in_tier)
    for name in ("p0", "p1", "p2", "d0", "d1"):
        node.start(name)
    node.compute("p0", TEXT)
    for name in ("p0", "p1", "p2", "d0", "d1"):
        node.publish(name, load_saves=0.5)
    keys = list(block_keys(list(TEXT.encode()), BLOCK, IDENTITY))
    for _ in range(2):  # what is in the tier changes
        asked.clear()
        node.prefill_of(TEXT)
        assert len(asked) == len(set(asked)) == len(prefix_blocks(TEXT)) <= len(keys)


def test_after_a_lost_batch_the_estimate_holds_until_the_worker_has_listed_its_blocks() -> None:
    node = Node("p0", "p1", "d0")
    node.publish("p0")
    node.compute("p1", TEXT)
    prefix = prefix_blocks(TEXT)
    worker = next(one for one in node.router.workers() if one.hello.worker == "p1")
    assert worker.overlap(prefix) == 1.0
    node.managers["p1"].on_change = None
    lost = node.events["p1"]
    lost.restart()
    assert lost.take("p1", 1) is not None  # and never arrives
    assert not node.router.should_list("p1")
    node.publish("p1")  # its report says that there was a batch
    assert not worker.cached.current
    assert worker.overlap(prefix) == 0.0, "nothing was sent to it, so the estimate knows nothing"
    asked = []
    for _ in range(5):
        asked.append(node.router.should_list("p1"))
        node.clock.advance(0.5)
    assert asked == [True, False, True, False, True]
    lost.restart()
    node.publish("p1")
    assert worker.overlap(prefix) == 1.0
    assert not node.router.should_list("p1")


def test_without_any_batch_a_worker_is_judged_by_what_was_sent_to_it() -> None:
    node = Node("p0", "p1", "d0")
    sent = node.prefill_of(TEXT)
    other = "p1" if sent == "p0" else "p0"
    node.publish(other)
    assert {node.prefill_of(TEXT) for _ in range(3)} == {sent}
    assert not node.router.should_list(sent)


def test_a_worker_that_names_more_blocks_than_it_has_is_not_believed() -> None:
    view = WorkerBlocks(PrefixKeys(), 4, lambda key: False)
    view.apply(Cached("p", 1, 1, True, b"".join(number.to_bytes(16) for number in range(3 * 4 + 1)), b""))
    assert not view.current
    assert not view.incomplete
    assert len(view) == 0
    large = WorkerBlocks(PrefixKeys(), 1 << 40, lambda key: False)
    stored = b"".join(number.to_bytes(16) for number in range(MOST_KEYS + 1))
    large.apply(Cached("p", 1, 1, True, stored, b""))
    assert len(large) == 0


@pytest.mark.parametrize("stored", [b"", b"short", bytes(17)])
def test_bytes_that_are_no_whole_key_are_ignored(stored: bytes) -> None:
    view = WorkerBlocks(PrefixKeys(), 4, lambda key: False)
    view.apply(Cached("p", 1, 1, True, stored, b""))
    assert len(view) == len(stored) // 16


def test_changes_that_nobody_reads_do_not_accumulate() -> None:
    blocks = BlockManager(8, 1, IDENTITY)
    events = BlockEvents(blocks)
    for number in range(1000):
        table = blocks.open([number])
        blocks.grow(table, 1)
        blocks.fill(table, [number], 1)
        blocks.close(table)
        assert events.pending <= 2 * blocks.total
    view = WorkerBlocks(PrefixKeys(), 8, lambda key: False)
    while batch := events.take("p", 1):
        view.apply(batch)
    assert view.current
    assert len(view) == len(blocks.registered) == 8


def test_a_view_is_kept_while_blocks_are_named_before_those_that_they_replace() -> None:
    blocks = BlockManager(3000, 1, IDENTITY)
    events, view = BlockEvents(blocks), WorkerBlocks(PrefixKeys(), blocks.total, lambda key: False)

    def compute(first: int, count: int) -> None:
        for token in range(first, first + count):
            table = blocks.open([token], 0)
            blocks.grow(table, 1)
            blocks.fill(table, [token], 1)
            blocks.close(table)

    compute(0, 3000)
    while batch := events.take("p", 1):
        view.apply(batch)
    compute(10_000, 1100)  # in place of the first ones,
    compute(0, 1100)  # which return in place of others
    while batch := events.take("p", 1):
        view.apply(batch)
        assert view.current
    assert len(view) == 3000


def test_a_long_list_is_sent_in_several_batches() -> None:
    blocks = BlockManager(3 * BATCH_KEYS, 1, IDENTITY)
    events = BlockEvents(blocks)
    tokens = list(range(2 * BATCH_KEYS + 5))
    table = blocks.open(tokens)
    blocks.grow(table, len(tokens))
    blocks.fill(table, tokens, len(tokens))
    view = WorkerBlocks(PrefixKeys(), blocks.total, lambda key: False)
    sizes = []
    while batch := events.take("p", 1):
        sizes.append(len(batch.stored) // 16)
        view.apply(batch)
    assert sizes == [BATCH_KEYS, BATCH_KEYS, 5]
    assert len(view) == len(tokens)


def test_the_keys_of_text_are_bounded_and_those_of_recent_prompts_stay() -> None:
    prefixes = PrefixKeys()
    for number in range(5000):
        prefixes.add(range(number * 20, number * 20 + 20), [bytes(16)] * 20)
    assert len(prefixes) == 1 << 16
    assert prefixes.get(5000 * 20 - 20) is not None
    assert prefixes.get(0) is None


def test_blocks_of_text_are_mapped_to_the_tokens_at_the_same_place() -> None:
    prefixes, prefix = PrefixKeys(), tuple(range(10))
    tokens = list(range(320))
    keys = list(block_keys(tokens, BLOCK, IDENTITY))
    prefixes.learn(prefix, 10.0, tokens, BLOCK, IDENTITY)
    assert [prefixes.get(block) for block in prefix] == keys
    prefixes.learn(prefix, 20.0, tokens, BLOCK, IDENTITY)  # of twice as much text
    assert [prefixes.get(block) for block in prefix] == [keys[max(0, (at + 1) // 2 - 1)] for at in range(10)]
    prefixes.learn((77,), 1.0, tokens[:20], BLOCK, IDENTITY)  # no whole block of tokens
    assert prefixes.get(77) is None


def test_what_is_learned_of_a_chat_with_passages_is_what_precedes_them() -> None:
    turns = (Message("system", "S" * 300), Message("user", "Q" * 300), Message("user", "R" * 300))
    generation = Generation(Sampling(1), 0, 1, messages=turns, retrieval=Retrieval("docs"))
    known = known_prefix(generation)
    assert len(known.blocks) == int(known.length) == (300 + 8 + 300 + 6) // BLOCK_CHARS
    assert known.whole == (3 * 300 + 20) // BLOCK_CHARS


async def test_a_frontend_that_misses_a_batch_asks_the_worker_for_all_its_blocks() -> None:
    async with running_link() as harness:
        prefill = await harness.worker("prefill", "prefill-0")
        await prefill.report(77, cached_batch=3)
        assert await prefill.receive() == ListCached()
        await prefill.send(Cached("prefill-0", 1, 4, True, b"", b""))
        await prefill.report(77, cached_batch=4)
        await prefill.settle()
        (worker,) = harness.router.workers()
        assert worker.cached.current
        await prefill.send(Cached("prefill-0", 2, 5, False, bytes(16), b""))  # of another process
        await prefill.settle()
        assert len(worker.cached) == 0
