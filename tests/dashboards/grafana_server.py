"""A fake Grafana that stores resources and validates paths, credentials, bodies and versions like the real one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
TOKEN = "glsa_test"
_BOARD_KEYS = {
    "id", "uid", "title", "tags", "schemaVersion", "editable", "graphTooltip", "refresh", "time", "timezone",
    "templating", "annotations", "links", "panels", "version", "description",
}  # fmt: skip


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GrafanaServer:
    """`writes` are the requests that changed something; everything lives under `prefix`."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.folders: dict[str, Json] = {}
        self.boards: dict[str, Json] = {}
        self.writes: list[str] = []
        self.fails_with = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def do_PUT(self) -> None:
                self._answer("PUT")

            def _answer(self, method: str) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                try:
                    if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                        raise Refused(401, "Invalid API key")
                    if server.fails_with:
                        raise Refused(server.fails_with, "database is locked")
                    if method != "GET" and not (self.headers.get("Content-Type") or "").startswith("application/json"):
                        raise Refused(400, "bad request data")
                    status, body = 200, server.handle(method, self.path, json.loads(raw) if raw else None)
                except Refused as refused:
                    status, body = refused.status, {"message": str(refused)}
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}{self.prefix}"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join(timeout=60)
        self._http.server_close()

    def handle(self, method: str, path: str, body: Json | None) -> Json:
        start = f"{self.prefix}/api/"
        if not path.startswith(start):
            raise Refused(404, f"{path} is not under {start}")
        match method, path.removeprefix(start).split("/"):
            case "GET", ["folders", uid]:
                return _found(self.folders, uid, "folder not found")
            case "POST", ["folders"]:
                return self._new_folder(_exactly(body, {"title", "uid"}))
            case "PUT", ["folders", uid]:
                return self._change_folder(uid, _some(body, {"title", "version", "overwrite"}))
            case "GET", ["dashboards", "uid", uid]:
                return _found(self.boards, uid, "Dashboard not found")
            case "POST", ["dashboards", "db"]:
                return self._save(_some(body, {"dashboard", "folderUid", "overwrite", "message"}))
        raise Refused(404, f"no such route: {method} {path}")

    def _new_folder(self, body: Json) -> Json:
        if body["uid"] in self.folders:
            raise Refused(409, "a folder with the same uid already exists")
        self.writes.append(f"folder {body['uid']}")
        self.folders[body["uid"]] = body | {"id": 7, "version": 1, "url": f"/dashboards/f/{body['uid']}/x"}
        return self.folders[body["uid"]]

    def _change_folder(self, uid: str, body: Json) -> Json:
        folder = _found(self.folders, uid, "folder not found")
        if body.get("version") != folder["version"] and not body.get("overwrite"):
            raise Refused(412, "the folder has been changed by someone else")
        self.writes.append(f"folder {uid}")
        folder |= {"title": body["title"], "version": folder["version"] + 1}
        self.folders[uid] = folder
        return folder

    def _save(self, body: Json) -> Json:
        board = body["dashboard"]
        if unknown := set(board) - _BOARD_KEYS:
            raise Refused(400, f"unknown keys {unknown}")
        if not board.get("title") or not isinstance(board.get("panels"), list):
            raise Refused(400, "Dashboard title cannot be empty")
        if board.get("id") is not None:
            raise Refused(404, "Dashboard not found")  # numeric ids are off
        if not set(board["uid"]) <= set("abcdefghijklmnopqrstuvwxyz-_0123456789") or len(board["uid"]) > 40:
            raise Refused(400, "uid contains illegal characters")
        if body.get("folderUid") not in self.folders:
            raise Refused(400, "folder not found")
        uid = board["uid"]
        known = self.boards.get(uid)
        if known is not None and not body.get("overwrite"):
            raise Refused(412, "The dashboard has been changed by someone else")
        self.writes.append(f"dashboard {uid}")
        version = known["dashboard"]["version"] + 1 if known else 1
        # It stores a body of its own: defaults added, order changed.
        stored = dict(sorted(board.items())) | {"id": 11, "version": version, "weekStart": ""}
        self.boards[uid] = {"dashboard": stored, "meta": {"folderUid": body["folderUid"], "provisioned": False}}
        return {"id": 11, "uid": uid, "status": "success", "version": version, "slug": "x", "url": f"/d/{uid}/x"}


def _found(kind: dict[str, Json], uid: str, message: str) -> Json:
    if uid not in kind:
        raise Refused(404, message)
    return dict(kind[uid])


def _some(body: Json | None, keys: set[str]) -> Json:
    if body is None or not set(body) <= keys:
        raise Refused(400, f"bad request data: {sorted(set(body or ()) - keys)}")
    return body


def _exactly(body: Json | None, keys: set[str]) -> Json:
    if set(_some(body, keys)) != keys:
        raise Refused(400, "bad request data")
    return body or {}
