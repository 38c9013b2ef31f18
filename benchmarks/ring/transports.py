"""Transports compared by `benchmarks.ring`: for each a pair of processes, round trips, and one-way traffic."""

import multiprocessing
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

from ipc import (
    RingConsumer,
    RingLayout,
    RingProducer,
    SharedMemory,
    bind,
    connect,
    format_ring,
    new_token,
    private_endpoint,
)
from ipc.memory.shared import MemoryReference
from ipc.ring.doorbell import EventfdBell, FdMailbox, SpinBudget, send_fds
from ipc.ring.ring import Watch

DIM = 384
BYTES = 4 * DIM
SPIN_NS = 200_000
LAYOUT = RingLayout(256, BYTES)
EPOCH = 1
MESSAGE, LAST = bytes(BYTES), b"\1" * BYTES

Nanoseconds = list[int]
context = multiprocessing.get_context("forkserver")


# ---- ring


class RingEnd:
    """One process's ends of a pair of rings, with its doorbells."""

    def __init__(self, sender: memoryview, receiver: memoryview, sleeper: EventfdBell, ringer: EventfdBell) -> None:
        self.producer = RingProducer(sender, LAYOUT, EPOCH)
        self.consumer = RingConsumer(receiver, LAYOUT, EPOCH)
        self.watch = Watch([self.consumer])
        self.outgoing = [memoryview(row) for row in self.producer.payload(np.uint8, 0, BYTES)]
        self.incoming = [memoryview(row) for row in self.consumer.payload(np.uint8, 0, BYTES)]
        self.sleeper, self.ringer = sleeper, ringer
        self.spin = SpinBudget(SPIN_NS)
        self.poller = select.poll()
        self.poller.register(sleeper.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        producer = self.producer
        self.outgoing[producer.loan()][:] = message
        if producer.send():
            self.ringer.ring()

    def receive(self) -> bytes:
        consumer = self.consumer
        if self.watch.spin(self.spin.ns) < 0:
            self.sleep()
        message = self.incoming[consumer.first].tobytes()
        consumer.release(1)
        return message

    def sleep(self) -> None:
        begin = time.monotonic_ns() - self.spin.ns
        while self.watch.spin(0) < 0:
            if self.watch.arm():
                self.poller.poll(100)
            self.watch.disarm()
            self.sleeper.silence()
        self.spin.learn(time.monotonic_ns() - begin)


def _ring_child(reference: MemoryReference, mailbox: str, one_way: int) -> None:
    pin(1)
    bells = EventfdBell(), EventfdBell()
    send_fds(mailbox, b"bells", [bell.fileno() for bell in bells])
    with SharedMemory.open(reference, max_size=1 << 24, writable=True) as memory:
        end = RingEnd(memory.view[LAYOUT.size :], memory.view[: LAYOUT.size], *bells)
        if one_way:
            _ring_sink(end, one_way)
            return
        while True:
            message = end.receive()
            end.send(message)
            if message == LAST:
                return


def _ring_sink(end: RingEnd, count: int) -> None:
    """Receive `count` vectors in batches, then send one answer."""
    whole = end.consumer.payload(np.float32, 0, DIM)
    while count:
        ready = end.consumer.ready(LAYOUT.slots)
        if ready == 0:
            if end.watch.spin(end.spin.ns) < 0:
                end.sleep()
            continue
        first = end.consumer.first
        whole[first : first + ready].copy()
        end.consumer.release(ready)
        count -= ready
    end.send(LAST)


@contextmanager
def _ring_pair(one_way: int = 0) -> Iterator[RingEnd]:
    with SharedMemory.create("trinity-bench", 2 * LAYOUT.size) as memory:
        for view in (memory.view[: LAYOUT.size], memory.view[LAYOUT.size :]):
            format_ring(view, LAYOUT, EPOCH)
        mailbox = FdMailbox()
        child = context.Process(target=_ring_child, args=(memory.reference, mailbox.name, one_way), daemon=True)
        child.start()
        ringer, sleeper = (EventfdBell(fd) for fd in mailbox.receive(b"bells", 2, 20_000))
        mailbox.close()
        yield RingEnd(memory.view[: LAYOUT.size], memory.view[LAYOUT.size :], sleeper, ringer)
        _join(child)
        ringer.close()
        sleeper.close()


def ring_round_trips(busy: int, idle: int) -> tuple[Nanoseconds, Nanoseconds]:
    with _ring_pair() as end:

        def trip() -> None:
            end.send(MESSAGE)
            end.receive()

        times = _busy(trip, busy), _idle(trip, idle)
        end.send(LAST)
        end.receive()
    return times


def ring_one_way(count: int) -> float:
    """Return vectors per second: written one by one, published and received in batches."""
    with _ring_pair(count) as end:
        producer = end.producer
        outgoing = end.outgoing
        begin = time.perf_counter_ns()
        left = count
        while left:
            run = min(producer.free(), left, 32)
            if run == 0:
                os.sched_yield()
                continue
            first = producer.position
            for position in range(first, first + run):
                outgoing[position % LAYOUT.slots][:] = MESSAGE
            if producer.send(run):
                end.ringer.ring()
            left -= run
        end.receive()
        return count / (time.perf_counter_ns() - begin) * 1e9


# ---- pyzmq


def _zmq_child(there: str, back: str, one_way: int) -> None:
    pin(1)
    incoming = bind(zmq.PULL, there, max_message_bytes=1 << 16)
    outgoing = connect(zmq.PUSH, back, max_message_bytes=1 << 16)
    outgoing.send(b"ready")
    if one_way:
        for _ in range(one_way):
            incoming.recv()
        outgoing.send(b"done")
    else:
        while (message := incoming.recv()) != LAST:
            outgoing.send(message)
    outgoing.send(LAST)
    incoming.recv()  # the parent has received it
    incoming.close()
    outgoing.close()


@contextmanager
def _zmq_pair(one_way: int = 0) -> Iterator[tuple[Any, Any]]:
    there, back = private_endpoint(new_token(), "there"), private_endpoint(new_token(), "back")
    incoming = bind(zmq.PULL, back, max_message_bytes=1 << 16)
    child = context.Process(target=_zmq_child, args=(there, back, one_way), daemon=True)
    child.start()
    outgoing = connect(zmq.PUSH, there, max_message_bytes=1 << 16)
    incoming.recv()
    yield incoming, outgoing
    if not one_way:
        outgoing.send(LAST)
    while incoming.recv() != LAST:
        pass
    outgoing.send(b"bye")
    _join(child)
    incoming.close()
    outgoing.close()


def zmq_round_trips(busy: int, idle: int) -> tuple[Nanoseconds, Nanoseconds]:
    with _zmq_pair() as (incoming, outgoing):

        def trip() -> None:
            outgoing.send(MESSAGE)
            incoming.recv()

        return _busy(trip, busy), _idle(trip, idle)


def zmq_one_way(count: int) -> float:
    with _zmq_pair(count) as (incoming, outgoing):
        begin = time.perf_counter_ns()
        for _ in range(count):
            outgoing.send(MESSAGE)
        incoming.recv()
        return count / (time.perf_counter_ns() - begin) * 1e9


# ---- timing


def pin(which: int) -> None:
    """Pin this process and the threads that it starts to the first or second core that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > which:
        os.sched_setaffinity(0, {cores[which]})


def _busy(trip: Callable[[], None], count: int) -> Nanoseconds:
    for _ in range(200):
        trip()
    return [_timed(trip) for _ in range(count)]


def _idle(trip: Callable[[], None], count: int) -> Nanoseconds:
    times = []
    for _ in range(count):
        time.sleep(0.003)
        times.append(_timed(trip))
    return times


def _timed(trip: Callable[[], None]) -> int:
    begin = time.perf_counter_ns()
    trip()
    return time.perf_counter_ns() - begin


def _join(child: Any) -> None:
    child.join(20)
    if child.is_alive():
        child.kill()
        child.join()
    child.close()
