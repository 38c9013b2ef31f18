"""Pushing dashboards: only missing or changed resources are written, and every failure is one error."""

import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from dashboards.provisioning import FOLDER_UID, Pusher, all_dashboards
from launchers.main import command_line
from runtime.errors import ConfigError, Unavailable, UsageError
from tests.dashboards.grafana_server import TOKEN, GrafanaServer

pytest.importorskip("grafana_client", reason="needs the extra [grafana]")

EVERYTHING = [f"folder {FOLDER_UID}", *(f"dashboard {uid}" for uid in all_dashboards())]


@pytest.fixture
def grafana() -> Iterator[GrafanaServer]:
    server = GrafanaServer()
    yield server
    server.close()


def actions(pusher: Pusher) -> list[str]:
    return [change.action for change in pusher.push()]


def test_an_empty_grafana_gets_the_folder_and_the_dashboards(grafana: GrafanaServer) -> None:
    assert set(actions(Pusher(grafana.url, TOKEN))) == {"create"}
    assert grafana.writes == EVERYTHING
    for uid, board in all_dashboards().items():
        stored = grafana.boards[uid]
        assert stored["meta"]["folderUid"] == FOLDER_UID
        assert stored["dashboard"]["panels"] == board["panels"]


def test_a_second_push_writes_only_what_was_changed(grafana: GrafanaServer) -> None:
    Pusher(grafana.url, TOKEN).push()
    grafana.folders[FOLDER_UID]["title"] = "renamed"
    grafana.boards["trinity-overview"]["dashboard"]["tags"] = []
    grafana.writes.clear()
    assert actions(Pusher(grafana.url, TOKEN)) == ["update", "update", "unchanged"]
    assert grafana.writes == EVERYTHING[:2]
    assert set(actions(Pusher(grafana.url, TOKEN))) == {"unchanged"}
    assert grafana.writes == EVERYTHING[:2]


def test_a_provisioned_dashboard_is_left_alone(grafana: GrafanaServer) -> None:
    Pusher(grafana.url, TOKEN).push()
    grafana.boards["trinity-overview"]["dashboard"]["tags"] = ["trinity"]
    grafana.boards["trinity-overview"]["meta"]["provisioned"] = True
    assert actions(Pusher(grafana.url, TOKEN)) == ["unchanged", "provisioned", "unchanged"]


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_grafana_under_a_path_is_reached_with_and_without_its_slash(slash: str) -> None:
    server = GrafanaServer(prefix="/grafana")
    try:
        assert set(actions(Pusher(server.url + slash, TOKEN))) == {"create"}
    finally:
        server.close()


def test_a_wrong_credential_is_one_error_that_does_not_show_it(grafana: GrafanaServer) -> None:
    with pytest.raises(ConfigError, match="does not accept the credential") as caught:
        Pusher(grafana.url, "wrong-secret").push()
    assert "wrong-secret" not in str(caught.value)


def test_a_failing_or_unreachable_grafana_is_one_error(grafana: GrafanaServer) -> None:
    grafana.fails_with = 500
    with pytest.raises(Unavailable, match="database is locked"):
        Pusher(grafana.url, TOKEN).push()
    with pytest.raises(Unavailable, match=r"Grafana at http://127\.0\.0\.1:1 does not answer:"):
        Pusher("http://user:secret@127.0.0.1:1", TOKEN).push()


@pytest.mark.parametrize("url", ["localhost:3000", "ftp://x", ""])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a Grafana URL"):
        Pusher(url, TOKEN)


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grafana_client", None)
    with pytest.raises(ConfigError, match="URLLIB3_NO_OVERRIDE=1 pip install"):
        Pusher("http://x", TOKEN)


def test_a_dry_run_does_not_write(grafana: GrafanaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    command = ["dashboards", "push", "--url", grafana.url]
    rehearsed = CliRunner().invoke(command_line(), [*command, "--dry-run"])
    assert (rehearsed.exit_code, rehearsed.output.count("create")) == (0, 3)
    assert grafana.writes == []
    assert CliRunner().invoke(command_line(), command).exit_code == 0
    assert grafana.writes == EVERYTHING
