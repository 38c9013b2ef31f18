"""Export of dashboards and alerts as files, and push to a Grafana: a folder and dashboards by fixed uids.

A push skips unchanged items. A dashboard is compared by a hash of its content in one of its tags, because Grafana
rewrites the body that it stores. Dashboards that Grafana has loaded from files (provisioned) are not changed. Needs the
extra [grafana], imported on first use.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from dashboards import fleet, overview
from dashboards.grafana import Json
from dashboards.rules import rules_yaml
from runtime.errors import ConfigError, Unavailable, UsageError

# ---- export as files, for provisioning of Grafana and Prometheus


GENERATED = Path(__file__).parent / "generated"


def all_dashboards() -> dict[str, Json]:
    """Return every dashboard by its uid."""
    return {overview.UID: overview.overview(), fleet.UID: fleet.fleet()}


def export(directory: Path) -> list[Path]:
    """Write every dashboard (JSON) and the alerts (YAML) to `directory`; return the files. Raises `ConfigError`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in _render_files().items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be written: {error.strerror}") from error
    return [directory / name for name in _render_files()]


def _render_files() -> dict[str, str]:
    boards = {
        f"{uid}.json": json.dumps(board, indent=1, ensure_ascii=False) + "\n" for uid, board in all_dashboards().items()
    }
    return boards | {"trinity-rules.yml": rules_yaml()}


FOLDER_UID = "trinity"
_TAG = "trinity-hash:"
_INSTALL = "URLLIB3_NO_OVERRIDE=1 pip install --no-binary urllib3-future 'trinity-runtime[grafana]'"

Credential = str | tuple[str, str] | None


class Change(NamedTuple):
    """An item in Grafana, the action that it needs, and what performs it, if it needs one."""

    item: str
    action: Literal["create", "update", "unchanged", "provisioned"]
    write: Callable[[], object] | None = None


class Pusher:
    """Pushes to one Grafana. `credential`: a service account's token, or name and password; None uses the URL's.

    The dashboards select Grafana's default data source. Raises `ConfigError` without the extra, `UsageError` for an
    invalid URL.
    """

    def __init__(self, url: str, credential: Credential = None, folder: str = "Trinity") -> None:
        try:
            client = importlib.import_module("grafana_client")
            self._errors = importlib.import_module("grafana_client.client")
            self._connection_error = importlib.import_module("niquests.exceptions").RequestException
        except ImportError as error:
            raise ConfigError(f"pushing dashboards needs grafana-client: {_INSTALL}") from error
        self._url = url
        self._api: Any = client.GrafanaApi.from_url(_with_slash(url), credential)
        self._folder = folder

    def changes(self) -> list[Change]:
        """Compare Grafana's state with the code; nothing is written. Raises as `push`."""
        with self._mapped_errors():
            boards = [self._board_change(uid, board) for uid, board in all_dashboards().items()]
            return [self._folder_change(), *boards]

    def push(self) -> list[Change]:
        """Write what is missing or different; return all items.

        Raises `Unavailable` if Grafana does not answer, `ConfigError` if it refuses.
        """
        changes = self.changes()
        with self._mapped_errors():
            for change in changes:
                if change.write is not None:
                    change.write()
        return changes

    # ---- folder, dashboards

    def _folder_change(self) -> Change:
        item = f"folder {self._folder!r}"
        folder = self._get(lambda: self._api.folder.get_folder(FOLDER_UID))
        if folder is None:
            return Change(item, "create", lambda: self._api.folder.create_folder(self._folder, uid=FOLDER_UID))
        if folder["title"] == self._folder:
            return Change(item, "unchanged")
        version = folder["version"]
        return Change(
            item, "update", lambda: self._api.folder.update_folder(FOLDER_UID, title=self._folder, version=version)
        )

    def _board_change(self, uid: str, board: Json) -> Change:
        item = f"dashboard {uid!r}"
        desired = _tagged(board)
        body = {"dashboard": desired, "folderUid": FOLDER_UID, "overwrite": True, "message": "trinity dashboards push"}
        existing = self._get(lambda: self._api.dashboard.get_dashboard(uid))
        if existing is not None and existing["meta"].get("provisioned"):
            return Change(item, "provisioned")
        if existing is None:
            return Change(item, "create", lambda: self._api.dashboard.update_dashboard(body))
        same = _hash_in(existing["dashboard"]) == _hash_in(desired) and existing["meta"].get("folderUid") == FOLDER_UID
        return (
            Change(item, "unchanged")
            if same
            else Change(item, "update", lambda: self._api.dashboard.update_dashboard(body))
        )

    def _get(self, read: Callable[[], Json]) -> Json | None:
        """Return the item; None if Grafana does not have it."""
        try:
            return read()
        except self._errors.GrafanaClientError as error:
            if error.status_code == 404:
                return None
            raise

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except self._errors.GrafanaUnauthorizedError as error:
            raise ConfigError(
                f"Grafana at {self._redacted_url()} does not accept the credential: {error.message}"
            ) from error
        except self._errors.GrafanaTimeoutError as error:
            raise Unavailable(f"Grafana at {self._redacted_url()} does not answer in time") from error
        except self._errors.GrafanaServerError as error:
            raise Unavailable(f"Grafana at {self._redacted_url()} answers {error.message}") from error
        except self._errors.GrafanaException as error:
            raise ConfigError(f"Grafana at {self._redacted_url()} refuses the change: {error.message}") from error
        except self._connection_error as error:
            raise Unavailable(f"Grafana at {self._redacted_url()} does not answer: {type(error).__name__}") from error

    def _redacted_url(self) -> str:
        """Return the URL without credentials and query."""
        parts = urlsplit(self._url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _with_slash(url: str) -> str:
    """Append a slash to the path, because grafana-client appends "api" directly."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not a Grafana URL: it must begin with http:// or https://")
    path = parts.path if not parts.path or parts.path.endswith("/") else f"{parts.path}/"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _tagged(board: Json) -> Json:
    text = json.dumps(board, sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return board | {"tags": [*board["tags"], _TAG + digest]}


def _hash_in(board: Json) -> str:
    return next((tag for tag in board.get("tags") or [] if tag.startswith(_TAG)), "")
