"""The examples of docs/examples/fleet: accepted by each balancer, and requests go where docs/fleet.md says."""

import http.server
import json
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, get_args

import httpx
import pytest

from runtime.testing.waiting import eventually
from tests.fleet.balancers import EXAMPLES, Affinity, balancing, configuration, free_port, program

NODES = ("http://127.0.0.1:8081", "http://[::1]:8082")
LISTEN = "127.0.0.1:9000"
WAIT = 60.0


def haproxy_accepts(file: Path) -> None:
    told = subprocess.run(
        [program("haproxy"), "-c", "-f", str(file)], capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "WARNING" not in told.stderr


def envoy_accepts(file: Path) -> None:
    command = [program("envoy"), "--mode", "validate", "-c", str(file)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert told.returncode == 0, told.stderr


def test_haproxy_accepts_the_example_without_warnings() -> None:
    haproxy_accepts(EXAMPLES / "haproxy.cfg")


@pytest.mark.parametrize("affinity", ["none", "conversation", "prefix"])
def test_haproxy_accepts_each_affinity_of_the_example(tmp_path: Path, affinity: Affinity) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(configuration("haproxy", NODES, LISTEN, affinity))
    assert all(node.removeprefix("http://") in file.read_text() for node in NODES)
    haproxy_accepts(file)


def test_envoy_accepts_the_example() -> None:
    envoy_accepts(EXAMPLES / "envoy.yaml")


@pytest.mark.parametrize("affinity", ["none", "conversation"])
def test_envoy_accepts_each_affinity_of_the_example(tmp_path: Path, affinity: Affinity) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(configuration("envoy", NODES, LISTEN, affinity))
    assert all(f'address: "{host}"' in file.read_text() for host in ("127.0.0.1", "::1"))
    envoy_accepts(file)


def test_vllm_router_has_every_option_and_policy_of_the_example() -> None:
    shown = subprocess.run([program("vllm-router"), "--help"], capture_output=True, text=True, timeout=WAIT, check=True)
    for affinity in get_args(Affinity):
        command = configuration("vllm-router", NODES, LISTEN, affinity).split("exec ")[1].split()
        assert {word for word in command if word.startswith("--")} <= set(shown.stdout.replace(",", " ").split())
        assert command[command.index("--policy") + 1] in shown.stdout


# ---- where requests go: nodes that answer with their own name


class _Named(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    broken_off: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps({"node": self.connection.getsockname()[1], "headers": dict(self.headers)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Like GET; /break disconnects on the first request to any node."""
        if self.path == "/break" and self.headers["x-request-id"] not in self.broken_off:
            self.rfile.read(int(self.headers["content-length"]))
            self.broken_off.add(self.headers["x-request-id"])
            self.close_connection = True
        else:
            self.do_GET()

    def log_message(self, *told: object) -> None:
        """Suppress the request log."""


@contextmanager
def named_nodes(count: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        urls = []
        for _ in range(count):
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Named)
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join, WAIT)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            urls.append(f"http://127.0.0.1:{server.server_address[1]}")
        yield urls


@contextmanager
def asked_through(name: str, home: Path, affinity: Affinity = "none") -> Iterator[httpx.Client]:
    program(name)
    with (
        named_nodes(3) as nodes,
        balancing(name, nodes, home, affinity) as url,
        httpx.Client(base_url=url, timeout=WAIT, trust_env=False) as client,
    ):
        yield client


def all_are_healthy(client: httpx.Client, header: str) -> None:
    """Wait until conversations go to all three nodes: which node has which depends on those that the balancer knows."""

    def taken() -> set[int]:
        named = [{header: f"before-{conversation}"} for conversation in range(24)]
        body = {"model": "m", "prompt": "p"}
        return {client.post("/v1/completions", headers=headers, json=body).json()["node"] for headers in named}

    eventually(lambda: len(taken()) == 3, 60, "all nodes to be asked")


@pytest.mark.parametrize("name", ["haproxy", "envoy"])
def test_node_specific_routes_are_blocked_at_a_balancer(name: str, tmp_path: Path) -> None:
    with asked_through(name, tmp_path) as client:
        assert [client.request(*asked).status_code for asked in (("POST", "/drain"), ("GET", "/metrics"))] == [404, 404]
        heard = client.get("/v1/models", headers={"x-request-id": "mine"}).json()["headers"]
        heard = {name.lower(): value for name, value in heard.items()}
        assert heard["x-request-id"] == "mine"
        assert heard["x-forwarded-for"]  # by which a node knows that it was not asked directly
        made = client.get("/v1/models").json()["headers"]
        assert {name.lower(): value for name, value in made.items()}["x-request-id"]


@pytest.mark.parametrize("name", ["haproxy", "envoy"])
def test_without_a_node_the_balancers_error_has_the_nodes_format(name: str, tmp_path: Path) -> None:
    program(name)
    with balancing(name, [f"http://127.0.0.1:{free_port()}"], tmp_path) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"model": "m"}, timeout=WAIT, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("name", "everywhere"), [("haproxy", True), ("envoy", True), ("vllm-router", False)])
def test_a_clients_key_is_forwarded_to_the_nodes(name: str, everywhere: bool, tmp_path: Path) -> None:
    """vllm-router leaves it out where it does not know the route, as docs/fleet.md says."""
    with asked_through(name, tmp_path) as client:

        def passed(path: str) -> bool:
            body, named = {"model": "m", "prompt": "p"}, {"Authorization": "Bearer secret"}
            heard = client.post(path, json=body, headers=named).json()["headers"]
            return {key.lower(): value for key, value in heard.items()}.get("authorization") == "Bearer secret"

        eventually(lambda: client.post("/v1/completions", json={"prompt": "p"}).status_code == 200, WAIT, "nodes")
        assert passed("/v1/completions")
        assert passed("/v1/retrieval") == everywhere


@pytest.mark.parametrize("name", ["haproxy", "envoy"])
def test_a_chunked_request_is_retried_when_its_node_disconnects(name: str, tmp_path: Path) -> None:
    with asked_through(name, tmp_path) as client:

        def pieces() -> Iterator[bytes]:
            client.get("/v1/models").raise_for_status()  # by now the balancer has the headers, sent on or not
            yield b"{}"

        named = {"x-request-id": f"{name}-in-pieces", "content-length": "2"}
        answer = client.post("/break", headers=named, content=pieces())
        assert (answer.status_code, named["x-request-id"] in _Named.broken_off) == (200, True)


@pytest.mark.parametrize(
    ("name", "header"),
    [("haproxy", "x-conversation-id"), ("envoy", "x-conversation-id"), ("vllm-router", "x-session-id")],
)
def test_a_conversation_stays_on_its_node_and_many_are_spread(name: str, header: str, tmp_path: Path) -> None:
    with asked_through(name, tmp_path, "conversation") as client:
        taken: Counter[int] = Counter()
        all_are_healthy(client, header)
        for conversation in range(24):
            named, body = {header: f"c-{conversation}"}, {"model": "m", "prompt": "p"}
            nodes = {client.post("/v1/completions", headers=named, json=body).json()["node"] for _ in range(3)}
            assert len(nodes) == 1
            taken.update(nodes)
        assert len(taken) == 3


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_prompts_with_a_common_prefix_go_to_one_node_of_haproxy(form: str, tmp_path: Path) -> None:
    def body(system: str, more: str) -> dict[str, object]:
        turns = [{"role": "system", "content": system}, {"role": "user", "content": more}]
        return {"messages": turns} if form == "chat" else {"prompt": (system * 1024)[:1024] + more}

    with asked_through("haproxy", tmp_path, "prefix") as client:
        taken: Counter[int] = Counter()
        for prefix in range(24):
            bodies = [body(f"You are number {prefix}. ", f"question {number}") for number in range(3)]
            nodes = {client.post("/v1/completions", json=one).json()["node"] for one in bodies}
            assert len(nodes) == 1
            taken.update(nodes)
        assert len(taken) == 3
