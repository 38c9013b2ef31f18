"""Tests of how clients and pools wait: spinning, sleeping, doorbells, event loops."""

import asyncio

from ipc import Result, RingClient
from tests.ipc.processes import served
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import answer, ask, vector, void


def test_a_sleeping_pool_and_a_sleeping_client_are_woken_up(server: RingServer, client: RingClient) -> None:
    with served(server, lambda s: void(answer(s))):
        for seed in range(100):
            ask(client, seed)
            assert client.wait(60_000)
            assert len(client.poll()) == 1


def test_asyncio_can_sleep_on_the_clients_descriptor(server: RingServer, client: RingClient) -> None:
    async def search(seed: int) -> Result:
        request_id = ask(client, seed)
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(client.fileno(), woken.set)
        try:
            while True:
                for result in client.poll():
                    assert result.request_id == request_id
                    return result
                if client.arm():
                    await asyncio.wait_for(woken.wait(), 60)
                woken.clear()
                client.disarm()
        finally:
            loop.remove_reader(client.fileno())

    async def main() -> None:
        for seed in range(50):
            assert (await search(seed)).distances.tolist() == vector(seed)[:2].tolist()

    with served(server, lambda s: void(answer(s))):
        asyncio.run(main())


def test_arm_prevents_sleeping_with_a_result_available(server: RingServer, client: RingClient) -> None:
    ask(client)
    answer(server)
    assert not client.arm()
    client.poll()
    assert client.arm()
    client.disarm()
