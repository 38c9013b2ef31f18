"""Helpers of the KV hand-over tests: arenas in host or device memory, their contents, offers and outcomes."""

import numpy as np

from ipc import HandoverSink, HandoverSource, KvArena, Offer, Outcome, new_token, private_endpoint
from ipc.memory.device import CudaReference, DeviceMemory
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere

SLOTS = 4
SLOT_BYTES = 1000
SOON_MS = 60_000


def make_arena(kind: str, epoch: int) -> KvArena:
    if kind == "host":
        return KvArena.create(SLOTS, SLOTS * SLOT_BYTES, epoch)
    from ipc.memory.cuda import CudaMemory

    return KvArena.create_on(CudaMemory.create(SLOTS * SLOT_BYTES, "cuda:0", FakeCuda()), SLOTS, epoch)


def open_device(reference: CudaReference) -> DeviceMemory:
    from ipc.memory.cuda import CudaMemory

    return CudaMemory.open(from_elsewhere(reference), "cuda:1", FakeCuda())


def address() -> str:
    return private_endpoint(new_token(), "decode-0")


def receive(sink: HandoverSink) -> list[Offer]:
    """Wait for offers, and return all that have arrived."""
    assert sink.socket.poll(SOON_MS), "no offer arrived"
    return sink.receive()


def outcomes(source: HandoverSource, count: int = 1) -> list[Outcome]:
    found: list[Outcome] = []
    while len(found) < count:
        found += source.poll()
        if len(found) < count:
            source.socket.poll(20)
    return found


def fill(arena: KvArena, slot: int, byte: int) -> None:
    arena.begin(slot)
    if arena.device is not None:
        arena.device.write(slot * SLOT_BYTES, np.full(SLOT_BYTES, byte, np.uint8))
        arena.device.flush()
    else:
        arena.payload[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes([byte]) * SLOT_BYTES


def content(sink: HandoverSink, offer: Offer, begin: int = 0, end: int = SLOT_BYTES) -> bytes:
    """Return bytes `begin:end` of the offered slot."""
    begin, end = offer.slot * SLOT_BYTES + begin, offer.slot * SLOT_BYTES + end
    if offer.device is None:
        return bytes(sink.memory(offer)[begin:end])
    found = np.zeros(end - begin, np.uint8)
    memory = sink.device_memory(offer)
    memory.read(begin, found)
    memory.flush()
    return found.tobytes()
