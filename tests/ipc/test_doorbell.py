"""Contract tests of both doorbell types, within a process and between two."""

import os
from collections.abc import Callable, Iterator

import pytest

from ipc import AttachTimeout, InvalidArgument, PeerLost, new_token, private_endpoint
from ipc.ring.doorbell import EventfdBell, FdMailbox, Ringer, Sleeper, ZmqRinger, ZmqSleeper, send_fds
from runtime.testing.waiting import until
from tests.ipc.processes import as_root, become_another_user, child, readable, succeeded

SOON_MS = 60_000


def _eventfd() -> tuple[Sleeper, Callable[[], Ringer]]:
    bell = EventfdBell()
    return bell, lambda: EventfdBell(os.dup(bell.fileno()))


def _zeromq() -> tuple[Sleeper, Callable[[], Ringer]]:
    endpoint = private_endpoint(new_token(), "bell")
    return ZmqSleeper(endpoint), lambda: ZmqRinger(endpoint)


@pytest.fixture(params=[_eventfd, _zeromq], ids=["eventfd", "zeromq"])
def bell(request: pytest.FixtureRequest) -> Iterator[tuple[Sleeper, Ringer]]:
    sleeper, make_ringer = request.param()
    ringer = make_ringer()
    ringer.ring()  # connected
    assert readable(sleeper, SOON_MS)
    quiet(sleeper)
    yield sleeper, ringer
    ringer.close()
    sleeper.close()


def quiet(sleeper: Sleeper) -> None:
    while readable(sleeper, 50):
        sleeper.silence()


def test_a_ring_wakes_the_sleeper_until_it_is_silenced(bell: tuple[Sleeper, Ringer]) -> None:
    sleeper, ringer = bell
    ringer.ring()
    assert readable(sleeper, SOON_MS)
    assert readable(sleeper, SOON_MS)
    quiet(sleeper)
    assert not readable(sleeper, 0)


def test_ringing_a_sleeper_that_never_reads_neither_blocks_nor_fails(bell: tuple[Sleeper, Ringer]) -> None:
    sleeper, ringer = bell
    for _ in range(20_000):
        ringer.ring()
    assert readable(sleeper, SOON_MS)
    quiet(sleeper)
    ringer.ring()
    assert readable(sleeper, SOON_MS)


def test_ringing_a_sleeper_that_has_exited_does_not_block(bell: tuple[Sleeper, Ringer]) -> None:
    sleeper, ringer = bell
    sleeper.close()
    for _ in range(2000):
        ringer.ring()


def _echo(mailbox: str, there: str, back: str, rounds: int) -> None:
    """Answer every ring with a ring: over eventfds sent to `mailbox`, or over the two ZeroMQ endpoints."""
    sleeper: Sleeper
    ringer: Ringer
    if mailbox:
        sleeper, ringer = EventfdBell(), EventfdBell()
        send_fds(mailbox, b"pair", [sleeper.fileno(), ringer.fileno()])
    else:
        sleeper, ringer = ZmqSleeper(there), ZmqRinger(back)
        ringer.ring()  # ready
    for _ in range(rounds):
        assert readable(sleeper, SOON_MS)
        sleeper.silence()
        ringer.ring()
    if not mailbox:
        assert readable(sleeper, SOON_MS)  # stay until the last answer has arrived


def test_two_processes_wake_each_other_by_eventfd() -> None:
    mailbox = FdMailbox()
    with child(_echo, mailbox.name, "", "", 300) as process:
        ringer, sleeper = (EventfdBell(fd) for fd in mailbox.receive(b"pair", 2, SOON_MS))
        for _ in range(300):
            ringer.ring()
            assert readable(sleeper, SOON_MS)
            sleeper.silence()
        assert succeeded(process)
    for end in (ringer, sleeper, mailbox):
        end.close()


def test_two_processes_wake_each_other_by_zeromq() -> None:
    there, back = private_endpoint(new_token(), "there"), private_endpoint(new_token(), "back")
    sleeper = ZmqSleeper(back)
    ringer = ZmqRinger(there)
    with child(_echo, "", there, back, 300) as process:
        assert readable(sleeper, SOON_MS)
        quiet(sleeper)
        for _ in range(300):
            ringer.ring()
            assert readable(sleeper, SOON_MS)
            sleeper.silence()
        ringer.ring()
        assert succeeded(process)
    sleeper.close()
    ringer.close()


def test_a_mailbox_drops_descriptors_with_a_wrong_token_or_count_and_closes_them() -> None:
    mailbox = FdMailbox()
    reader, writer = os.pipe()
    send_fds(mailbox.name, b"wrong", [writer])
    send_fds(mailbox.name, b"right", [writer, writer])
    os.close(writer)

    def receive() -> None:
        with pytest.raises(AttachTimeout):
            mailbox.receive(b"right", 1, 50)

    receive()
    with open(reader, "rb") as pipe:
        until(lambda: readable(pipe, 0), receive)  # a busy machine may leave it time for the first of them alone
        assert pipe.read() == b""  # the last writer is closed
    mailbox.close()


@pytest.mark.parametrize("name", ["", "x" * 101, "a\0b"])
def test_an_invalid_mailbox_name_is_rejected(name: str) -> None:
    with pytest.raises(InvalidArgument):
        send_fds(name, b"token", [0])


def test_descriptors_without_a_receiver_are_rejected() -> None:
    with pytest.raises(PeerLost):
        send_fds("trinity-nobody", b"token", [0])


def _connect_as_another_user(mailbox: str) -> None:
    become_another_user()
    send_fds(mailbox, b"token", [0])


@as_root
def test_descriptors_of_another_user_are_dropped() -> None:
    mailbox = FdMailbox()
    with child(_connect_as_another_user, mailbox.name) as process:
        assert succeeded(process)
    with pytest.raises(AttachTimeout):
        mailbox.receive(b"token", 1, 50)
    mailbox.close()
