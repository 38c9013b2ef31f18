"""Nodes behind Ray Serve: streams go through, a second one starts under load, and one that is killed is replaced."""

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("ray", reason="pip install 'trinity-runtime[ray]'")

import ray
from ray import serve

from launchers.fleet.ray_serve import Fleet, by_load, nodes
from runtime.errors import ConfigError, Unavailable
from runtime.node.placement.plan import nodes_dir
from runtime.node.run_dir import NodeInfo, find_node
from runtime.testing.waiting import eventually, until
from tests.e2e.conftest import CONFIG
from tests.fleet.balancers import free_port
from tests.fleet.load import load, more

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
START_S = 300.0
LONG = {"model": "tiny", "prompt": "on and on", "max_tokens": 1500, "stream": True}


def running() -> list[NodeInfo]:
    """Return the replicas' nodes."""
    found = []
    for path in nodes_dir().glob("ray-*"):
        with suppress(Unavailable):  # it was killed there
            found.append(find_node(path))
    return found


def replicas() -> int:
    """Return the replicas that Ray sends requests to."""
    deployment = serve.status().applications["default"].deployments["trinity"]
    return int(deployment.replica_states.get("RUNNING", 0))


def start_ray() -> None:
    """Start Ray, or skip the test if Ray cannot run on this machine."""
    for again in (True, False):
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
            return
        except Exception as error:  # Ray has no type of its own for it
            ray.shutdown()
            if not again:
                pytest.skip(f"Ray does not start on this machine: {error!r}")


@pytest.fixture(scope="module")
def url(model: Path, collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One node behind Ray, scaled to two under load."""
    home, port = tmp_path_factory.mktemp("ray"), free_port()
    config = home / "node.toml"
    text = CONFIG.format(name="fleet", run_dir="", model=model, collection=collection, drain_s=20.0)
    config.write_text(text)
    token = home / "token"
    token.write_text(secrets.token_hex(32))  # else Ray leaves one in the user's home
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN_PATH": str(token)}.items():
            patch.setenv(name, value)
        patch.setenv("XDG_RUNTIME_DIR", str(home))
        home.chmod(0o700)
        start_ray()
        try:
            serve.start(http_options={"port": port})
            serve.run(nodes(Fleet(config=str(config), most=2, target=2, look_back_s=1)))
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
            assert running() == []


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=START_S, trust_env=False) as made:
        yield made


def test_a_nodes_stream_passes_through_unbuffered(client: httpx.Client) -> None:
    assert client.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    refused = client.post("/v1/completions", json={"model": "none", "prompt": "p"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert [client.request(*asked).status_code for asked in (("POST", "/drain"), ("GET", "/metrics"))] == [404, 404]
    large = client.post("/v1/completions", json={"model": "tiny", "prompt": "p" * (2 << 20)})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    with client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 24}) as answer:
        parts = list(answer.iter_raw())
    assert len(parts) > 3
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")


def test_a_client_that_goes_ends_its_request_in_the_node(client: httpx.Client) -> None:
    (node,) = running()

    def hang_up() -> None:  # again and again: an answer may be whole before
        with client.stream("POST", "/v1/completions", json=LONG) as answer:
            next(answer.iter_raw())

    def ended() -> list[str]:
        lines = httpx.get(f"{node.url}/metrics", timeout=60, trust_env=False).text.splitlines()
        counts = [line for line in lines if line.startswith("trinity_requests_total") and 'outcome="cancelled"' in line]
        return [line for line in counts if not line.endswith(" 0.0")]

    until(ended, hang_up, what="a request to be cancelled")


def test_a_second_node_starts_under_load_and_one_that_is_killed_is_accounted_for_and_replaced(url: str) -> None:
    with load(url, clients=8) as outcomes:
        eventually(lambda: replicas() == 2, START_S, "a second replica")
        more(outcomes, 40)
        assert outcomes.lost == []
        killed, other = running()
        os.kill(killed.pid, signal.SIGKILL)
        more(outcomes, 40)
        eventually(lambda: len({node.pid for node in running()} - {killed.pid, other.pid}) == 1, START_S, "a new node")
        eventually(lambda: replicas() == 2, START_S, "it to be ready")
        lost = len(outcomes.lost)
        more(outcomes, 40)
        assert len(outcomes.lost) == lost
    assert len(outcomes.ended) == outcomes.sent
    assert {one.error[:3] for one in outcomes.lost if not one.begun} <= {"500", "503"}  # told so: Ray repeats nothing


def asked(nodes: int, waiting: list[float], in_flight: list[float], queued: float = 0.0) -> int:
    return by_load(
        SimpleNamespace(
            aggregated_metrics={"waiting": dict(enumerate(waiting)), "in_flight": dict(enumerate(in_flight))},
            total_queued_requests=queued,
            current_num_replicas=nodes,
            config=SimpleNamespace(target_ongoing_requests=8.0),
        )
    )[0]


def test_the_number_of_nodes_follows_the_target_in_flight_plus_one_while_all_queue() -> None:
    assert asked(1, [0], [8]) == 1
    assert asked(1, [0], [9]) == 2
    assert asked(1, [0], [8], queued=1) == 2
    assert asked(2, [0, 0], [3, 2]) == 1
    assert asked(1, [], []) == 1
    assert asked(2, [1, 4], [4, 8]) == 3
    assert asked(2, [0, 4], [4, 8]) == 2
    assert asked(2, [4], [8]) == 1  # of the other nothing is known yet


def test_an_invalid_node_configuration_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("[node]\nname = 3\n")
    with pytest.raises(ConfigError, match=r"node\.toml: .*name"):
        nodes(Fleet(config=str(tmp_path / "node.toml")))
    with pytest.raises(ValueError, match="most"):
        Fleet(config="node.toml", most=0)
