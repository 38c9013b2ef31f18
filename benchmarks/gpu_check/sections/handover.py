"""Hand-over of the KV of 512 tokens between processes: correctness, and its time against a plain copy.

On a GPU it uses CUDA IPC, device to device, with both processes on one GPU; in a dry run, shared memory.
"""

import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.gpu_check.report import Outcome, micros
from benchmarks.gpu_check.sections.model import torch_device
from benchmarks.gpu_check.setup import Setup
from ipc import new_token, private_endpoint

_TOKENS, _BLOCK, _EPOCH = 512, 32, 1
_LEASE_MS = 60_000.0
_ROUNDS = 5


def check(setup: Setup, outcome: Outcome) -> None:
    """Hand over blocks in order, and scattered. Raises AssertionError if a copy differs from the offer."""
    device = torch_device(setup)
    layers, heads, dim = (2, 2, 16) if setup.small else (32, 8, 128)  # of an 8-billion-parameter Llama
    shape = (layers, 2, 2 * _TOKENS // _BLOCK, heads, _BLOCK, dim)
    from runtime.serving.kv.transport import transport_for

    transport = transport_for(device)
    source = transport.source("prefill-0", leases=1, kv_bytes=4 * int(np.prod(shape)), epoch=_EPOCH, lease_ms=_LEASE_MS)
    _fill(source.memory, shape, device)
    endpoint = private_endpoint(new_token(), "decode-0")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    puller = context.Process(target=_pull, args=(theirs, endpoint, device, shape), daemon=True)
    puller.start()
    theirs.close()
    count = _TOKENS // _BLOCK
    orders = {
        "in order": list(range(count)),
        "scattered": np.random.default_rng(0).permutation(2 * count)[:count].tolist(),
    }
    try:
        results: dict[str, Any] = {}
        for name, taken in orders.items():
            for _ in range(_ROUNDS):
                source.offer(endpoint, 0, json.dumps(taken).encode())
                ended = _outcome(source)
                assert ended.accepted, f"the hand-over was rejected: {ended.reason}"
            assert ours.poll(_LEASE_MS / 1e3), "the other process did not answer in time"
            results[name] = ours.recv()
        puller.join(_LEASE_MS / 1e3)
        assert puller.exitcode == 0, f"the other process ended with {puller.exitcode}"
    finally:
        if puller.is_alive():
            puller.kill()
            puller.join(_LEASE_MS / 1e3)
        ours.close()
        source.close()
    megabytes = results["in order"]["bytes"] / 2**20
    outcome.data |= results
    for name, took in results.items():
        outcome.add(f"{_TOKENS} tokens, {megabytes:,.0f} MiB, blocks {name}: whole, p50", micros(took["pull_s"]))
        outcome.add("… of it the host was busy", micros(took["host_s"]))
        outcome.add("… against a plain copy", f"{took['pull_s'] / took['copy_s']:.2f}×")
    outcome.add(
        "device to device, through CUDA IPC", "yes" if setup.on_gpu else "skipped: no GPU (host memory instead)"
    )


def _fill(memory: Any, shape: tuple[int, ...], device: str) -> None:
    import torch

    if isinstance(memory, memoryview):
        there = torch.frombuffer(memory, dtype=torch.float32, count=int(np.prod(shape))).view(shape)
    else:
        there = torch.as_tensor(memory, device=device).view(torch.float32).view(shape)
    there.copy_(_content(shape))
    if device != "cpu":
        torch.cuda.synchronize(device)


def _content(shape: tuple[int, ...]) -> Any:
    """Return the KV contents, identical in both processes."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _outcome(source: Any) -> Any:
    end = time.monotonic() + _LEASE_MS / 1e3
    while not (outcomes := source.poll()):
        assert time.monotonic() < end, "no message from the other process in time"
        source.socket.poll(100)
    return outcomes[0]


def _pull(pipe: Connection, endpoint: str, device: str, shape: tuple[int, ...]) -> None:
    """Pull offers into other blocks, compare the contents, and send the times."""
    import torch

    from runtime.serving.kv.transport import transport_for

    torch.set_num_threads(1)
    sink = transport_for(device).sink(endpoint)
    expected = _content(shape)
    here = torch.zeros(shape, device=device)
    plain = [torch.zeros(shape[2] // 2 * here[:, :, 0].numel(), device=device) for _ in range(2)]
    for _ in range(2):
        pulls, hosts, copies, nbytes = [], [], [], 0
        for _ in range(_ROUNDS):
            while not (offers := sink.receive()):
                assert sink.socket.poll(int(_LEASE_MS)), "no offer in time"
            (offer,) = offers
            taken: list[int] = json.loads(offer.payload)
            given = [(block + 3) % shape[2] for block in taken]
            here.zero_()
            copies.append(_timed(lambda: plain[0].copy_(plain[1]), device))
            transfer = sink.pull(offer, taken, here.numpy() if device == "cpu" else here, given)
            begin = time.perf_counter()
            done = transfer.step()
            hosts.append(time.perf_counter() - begin)
            while not done:
                done = transfer.step()
            pulls.append(time.perf_counter() - begin)
            nbytes = transfer.bytes
            assert torch.equal(here[:, :, given].cpu(), expected[:, :, taken]), (
                "the pulled KV differs from the offered one"
            )
            assert sink.is_current(offer)
            sink.acknowledge(offer)
        medians = (float(np.median(times)) for times in (pulls, hosts, copies))
        pipe.send(dict(zip(("pull_s", "host_s", "copy_s"), medians, strict=True)) | {"bytes": nbytes})
    sink.close()


def _timed(action: Any, device: str) -> float:
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    wait()
    begin = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - begin
