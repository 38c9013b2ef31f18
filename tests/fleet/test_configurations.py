"""`trinity fleet`: its output is accepted by each balancer, and invalid input is refused by name."""

import http.server
import json
import shlex
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from benchmarks.fleet.balancers import balancing, free_port
from launchers.fleet.haproxy import Sticky
from launchers.fleet.nodes import listen_address, node_addresses
from runtime.errors import InvalidRequest
from runtime.testing.waiting import eventually
from tests.fleet.balancers import printed, program

NODES = ("--node", "http://127.0.0.1:8081", "--node", "http://[::1]:8082", "--node", "http://node-3.internal:8080")
WAIT = 60.0


@pytest.mark.parametrize("sticky", ["none", "conversation", "prefix"])
def test_haproxy_accepts_its_configuration_without_warnings(tmp_path: Path, sticky: str) -> None:
    found, file = program("haproxy"), tmp_path / "haproxy.cfg"
    file.write_text(printed("haproxy", *NODES[:4], "--sticky", sticky))  # it looks names up: without the third
    told = subprocess.run([found, "-c", "-f", str(file)], capture_output=True, text=True, timeout=WAIT, check=False)
    assert told.returncode == 0, told.stderr
    assert "WARNING" not in told.stderr


@pytest.mark.parametrize("sticky", ["none", "conversation"])
def test_envoy_accepts_its_configuration(tmp_path: Path, sticky: str) -> None:
    found, file = program("envoy"), tmp_path / "envoy.yaml"
    file.write_text(printed("envoy", *NODES, "--sticky", sticky))
    command = [found, "--mode", "validate", "-c", str(file)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert told.returncode == 0, told.stderr


def test_vllm_router_has_every_option_that_its_commands_name() -> None:
    shown = subprocess.run([program("vllm-router"), "--help"], capture_output=True, text=True, timeout=WAIT, check=True)
    for sticky in ("none", "conversation", "prefix"):
        command = shlex.split(printed("vllm-router", *NODES, "--sticky", sticky))
        assert {word for word in command if word.startswith("--")} <= set(shown.stdout.replace(",", " ").split())
        assert command[command.index("--policy") + 1] in shown.stdout


def test_every_node_is_in_the_printed_configuration() -> None:
    for name in ("haproxy", "vllm-router"):
        assert all(node.removeprefix("http://") in printed(name, *NODES) for node in NODES[1::2])
    assert all(f'address: "{host}"' in printed("envoy", *NODES) for host in ("127.0.0.1", "::1", "node-3.internal"))


@pytest.mark.parametrize(
    "url",
    ["https://n:8080", "n:8080", "http://n", "http://n:0", "http://n:70000", "http://n:80/v1", "http://u@n:80",
     "http://n:80\n    server evil 1.2.3.4:80", "http://n:80 check", "", 'http://n"},x:{y:80', "http://n;m:80",
     "http://nöde:80", "http://[::1%lo]:80", "http://[::g]:80", "http://::1:80"],
)  # fmt: skip
def test_an_invalid_node_address_is_refused_with_the_expected_format(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^--node is .*: expected http://HOST:PORT$"):
        node_addresses([url])


def test_duplicate_nodes_and_an_empty_list_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="n:80 is given twice"):
        node_addresses(["http://n:80", "http://N:80/"])
    with pytest.raises(InvalidRequest, match="no node"):
        node_addresses([])
    with pytest.raises(InvalidRequest, match=r"^--listen is .*HOST:PORT$"):
        listen_address("9000")


@pytest.mark.parametrize("listen", ["n:80", "[::1]:8082", "localhost:81", "0.0.0.0:81", "[::]:81"])
def test_a_balancer_on_a_nodes_address_is_refused(listen: str) -> None:
    nodes = node_addresses(["http://n:80", "http://[::1]:8082", "http://127.0.0.1:81"])
    with pytest.raises(InvalidRequest, match=r"^--listen is .*: the node http://.* already listens there$"):
        listen_address(listen, nodes)
    assert listen_address("m:80", nodes).host == "m"


@pytest.mark.parametrize("listen", ["0.0.0.0:9000", "[::]:9000", "localhost:9000"])
def test_the_listen_address_has_the_balancers_format(listen: str, tmp_path: Path) -> None:
    file, options = tmp_path / "made.yaml", (*NODES[:4], "--listen", listen)
    file.write_text(printed("haproxy", *options))
    subprocess.run([program("haproxy"), "-c", "-q", "-f", str(file)], check=True, timeout=WAIT)
    if listen.startswith("localhost"):
        with pytest.raises(InvalidRequest, match=r"^--listen is localhost:9000: Envoy requires an IP .*127\.0\.0\.1"):
            printed("envoy", *options)
        return
    file.write_text(printed("envoy", *options))
    subprocess.run([program("envoy"), "--mode", "validate", "-c", str(file)], check=True, timeout=WAIT)


def test_body_based_routing_is_refused_for_envoy() -> None:
    with pytest.raises(InvalidRequest, match="--sticky conversation, or HAProxy"):
        printed("envoy", *NODES, "--sticky", "prefix")


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
def asked_through(name: str, home: Path, sticky: Sticky = "none") -> Iterator[httpx.Client]:
    program(name)
    with (
        named_nodes(3) as nodes,
        balancing(name, nodes, home, sticky) as url,
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
