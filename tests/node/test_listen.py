"""The HTTP socket: refused if it cannot be bound or if other hosts could connect without a key."""

import socket

import pytest

from runtime.errors import ConfigError, ResourceBusy
from runtime.node.config import HttpSection
from runtime.node.supervisor.listen import listen


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = ["127.0.0.1", "localhost", pytest.param("::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6"))]


@pytest.mark.parametrize("host", HOSTS)
def test_it_listens_on_loopback_without_a_key(host: str) -> None:
    with (
        listen(HttpSection(host=host, port=0)) as listener,
        socket.create_connection(listener.getsockname()[:2], timeout=60) as client,
    ):
        accepted, _ = listener.accept()
        accepted.close()
        assert client.getpeername() == listener.getsockname()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_hosts_need_keys(host: str) -> None:
    with pytest.raises(ConfigError, match=r"is open to others: set http\.api_keys_file, or listen on 127\.0\.0\.1"):
        listen(HttpSection(host=host, port=0))
    if host == "0.0.0.0":
        listen(HttpSection(host=host, port=0, api_keys_file="/keys")).close()


@pytest.mark.parametrize("host", ["", "no-such-host.invalid", "x" * 64, "a b"])
def test_an_invalid_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^http\.host = "):
        listen(HttpSection(host=host, port=0))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        listen(HttpSection(host="192.0.2.1", port=0, api_keys_file="/keys"))


def test_a_port_in_use_is_a_temporary_error() -> None:
    with listen(HttpSection(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            ResourceBusy, match=rf"http\.port = {port}: cannot listen on 127\.0\.0\.1: .*in use: set another"
        ):
            listen(HttpSection(port=port))
