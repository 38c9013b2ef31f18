"""A stand-in for the Python interpreter of vLLM's environment: `FakeServer`'s model behind a Unix socket.

It starts a process that is its engine core, and ends when that dies, as vLLM does. The environment says how it is:
FAKE_VERSION; FAKE_FAULT, an error with which it ends at once; FAKE_HOLD, a file: while it exists, no stream goes beyond
its first chunks. The core's process id is left beside the socket.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from runtime.engines.openai.http import Response
from tests.engines.fake_openai import Behaviour, FakeServer, metrics

HELD_AFTER = 10  # chunks
KV_METRICS = """\
# HELP vllm:fake_kv_total Prompts computed for others, and taken from others
# TYPE vllm:fake_kv_total counter
vllm:fake_kv_total{{engine="0",model_name="fake",way="computed"}} {computed}
vllm:fake_kv_total{{engine="0",model_name="fake",way="pulled"}} {pulled}
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{{generation="0"}} 1.0
"""


class HttpFront:
    """HTTP server in front of a `FakeServer`."""

    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        self.hold = Path(os.environ["FAKE_HOLD"]) if "FAKE_HOLD" in os.environ else None

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        path = urlsplit(target).path
        if path in ("/health", "/metrics"):
            kv = KV_METRICS.format(computed=self.fake.computed, pulled=self.fake.pulled)
            text = metrics(running=self.fake.open) + kv if path == "/metrics" else ""
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
            return True
        answer = await self.fake.request(method, f"http://fake{path}", headers, body or None)
        writer.write(f"HTTP/1.1 {answer.status} \r\ntransfer-encoding: chunked\r\n\r\n".encode())
        sending = asyncio.ensure_future(self._send(answer, writer))
        gone = asyncio.ensure_future(reader.read(1))  # the only input now is the end of the connection
        await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
        whole = sending.done()
        for task in (sending, gone):
            task.cancel()
        await asyncio.gather(sending, gone, return_exceptions=True)
        answer.close()
        return whole and sending.exception() is None

    async def _send(self, answer: Response, writer: asyncio.StreamWriter) -> None:
        sent = 0
        async for part in answer.iter_bytes():
            while sent > HELD_AFTER and self.hold is not None and self.hold.exists():
                await asyncio.sleep(0.01)
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            sent += part.startswith(b"data: ")
        writer.write(b"0\r\n\r\n")


async def serve(socket: str, model: str, kv_role: str, core: subprocess.Popen[bytes]) -> None:
    """Serve until the core dies."""
    front = HttpFront(FakeServer(Behaviour(model=model, kv_role=kv_role)))
    async with await asyncio.start_unix_server(front.connected, socket):
        await asyncio.to_thread(core.wait)
    sys.exit("EngineDeadError: the engine core has died")


def main() -> None:
    if sys.argv[1] == "-c":  # which version is installed?
        print(os.environ["FAKE_VERSION"])
        return
    assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    options = argparse.ArgumentParser()
    options.add_argument("--uds")
    options.add_argument("--served-model-name")
    options.add_argument("--kv-transfer-config", type=json.loads, default={})
    given, others = options.parse_known_args(sys.argv[3:])
    print(f"(APIServer pid=1) INFO 01-02 03:04:05 [api.py:1] asked for {json.dumps(others)}", flush=True)
    if fault := os.environ.get("FAKE_FAULT"):
        sys.exit(f"Traceback (most recent call last):\n{fault}\nRuntimeError: Engine core initialization failed.")
    core = subprocess.Popen(["sleep", "600"])
    Path(f"{given.uds}.core").write_text(str(core.pid))
    asyncio.run(serve(given.uds, given.served_model_name, given.kv_transfer_config.get("kv_role", ""), core))


if __name__ == "__main__":
    main()
