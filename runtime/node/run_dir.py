"""Run directory of a node: `node.json` with its endpoints, and its logs. It is removed when the node stops.

The directory is private to the user, and its parent does not allow other users to replace it. The supervisor holds a
lock on it, which the kernel releases when the process ends, so that a stale directory never prevents a start. A node
in the user's directory of run directories is found by its name, another one by its path.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import time
from pathlib import Path

import msgspec

from ipc.native.private import others_can_replace
from runtime.errors import ConfigError, InvalidRequest, ResourceBusy, Unavailable
from runtime.files import read_regular
from runtime.node.placement.plan import ANSWERS_FOLDER, KV_FOLDER, default_run_dir, nodes_dir

_PAUSE_S = 0.01  # between two tries
LOGS = "logs"  # folder of the log files, unless log.directory is set
_USED = ".node.json"  # with node.json: one of them is in a directory in which a node runs, or was killed
_SUFFIXES = (".sock", ".old", ".prom", ".new", ".kv", ".rep")  # of what a killed node may have left
_TRIES = 300  # of locking; one fails only during a concurrent `find_node` or removal

log = logging.getLogger("supervisor")


class NodeInfo(msgspec.Struct, frozen=True):
    """Endpoints and paths of a running node, for other processes of the user.

    `pools`: endpoints of its vector-pool workers. `logs`: directory of its log files.
    """

    name: str
    pid: int
    url: str
    control: str
    pools: tuple[str, ...]
    collections: tuple[str, ...]
    logs: str = ""


class RunDir:
    """A locked run directory."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def fileno(self) -> int:
        """The locked directory's descriptor. Closing it releases the lock."""
        return self._fd

    @classmethod
    def acquire(cls, path: Path) -> "RunDir":
        """Create and lock the directory. Raises `ResourceBusy` if a live node holds it, `ConfigError` if it cannot be
        used or others could write to it."""
        missing: OSError | None = None
        for _ in range(_TRIES):
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.mkdir(mode=0o700, exist_ok=True)
                fd = _open(path)
            except FileNotFoundError as error:  # removed by a stopping node in between
                missing = error
                continue
            except OSError as error:
                raise ConfigError(f"node.run_dir: cannot use {path}: {error.strerror}") from error
            try:
                _check_private(path, os.fstat(fd))
                if _lock(fd, fcntl.LOCK_EX):
                    _check_own(path, fd)
                    with contextlib.suppress(FileNotFoundError):  # of a killed node; at once, since others read it
                        os.rename("node.json", _USED, src_dir_fd=fd, dst_dir_fd=fd)
                    if _is_at(path, fd):
                        _remove_stale(path)
                        return cls(path, fd)
                elif not _lock(fd, fcntl.LOCK_SH):  # otherwise a `find_node` holds it briefly
                    key = "node.name" if path == default_run_dir(path.name) else "node.run_dir"
                    raise ResourceBusy(f"a node already runs in {path}; stop it, or set another {key}")
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            time.sleep(_PAUSE_S)
        raise ResourceBusy(f"node.run_dir: cannot use {path}: {missing.strerror if missing else 'it is in use'}")

    def write(self, info: NodeInfo) -> None:
        """Write `node.json` atomically."""
        temporary = self.path / _USED
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(info))
        temporary.rename(self.path / "node.json")

    def release(self) -> None:
        """Remove the directory and release the lock."""
        for file in (*_files(self.path), self.path / "node.json", self.path / _USED):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be removed: %s", file, error.strerror)
        _remove_stale(self.path)
        with contextlib.suppress(OSError):
            (self.path / LOGS).rmdir()
        with contextlib.suppress(OSError):  # other files are there
            self.path.rmdir()
        with contextlib.suppress(OSError):
            nodes_dir().rmdir()  # empty if this was the last node
        os.close(self._fd)


def _files(run_dir: Path) -> list[Path]:
    """Return the engines' and logs' files, which a node removes when it ends."""
    patterns = "*.sock", "*.sock.old", "*.prom", "*.new", f"{LOGS}/*.log*"
    events = [path for pattern in ("*.kv", "*.rep") for path in run_dir.glob(pattern) if path.is_socket()]  # of vLLM
    return [*events, *(path for pattern in patterns for path in run_dir.glob(pattern))]


def _folders(run_dir: Path) -> list[Path]:
    """Return the folders of KV and of stored answers, which a node removes when it starts and when it ends."""
    patterns = KV_FOLDER, f"{ANSWERS_FOLDER}*"
    return [path for pattern in patterns for path in run_dir.glob(pattern) if path.is_dir()]


def _remove_stale(run_dir: Path) -> None:
    """Remove KV and stored answers, which end with their node, also those that a killed node has left."""
    for stale in _folders(run_dir):
        shutil.rmtree(stale, ignore_errors=True)


def _check_own(path: Path, fd: int) -> None:
    """Refuse a directory in which a node would remove somebody's files: some that it removes are there beside others
    that none writes, and no node has run there and was killed."""
    with os.scandir(fd) as entries:
        files = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    foreign = sorted(name for name in files if not name.endswith(_SUFFIXES))
    if foreign and files.isdisjoint(("node.json", _USED)) and (removed := (*_folders(path), *_files(path))):
        raise ConfigError(
            f"node.run_dir: {path} has {str(removed[0].relative_to(path))!r}, which nodes remove, beside "
            f"{foreign[0]!r}, which no node wrote: give a directory of its own"
        )


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        raise ConfigError(f"node.run_dir: {path} belongs to uid {status.st_uid}, not to you (uid {os.getuid()})")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(
            f"node.run_dir: {path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it"
        )
    _check_parent(path.absolute().parent, path)


def _check_parent(parent: Path, path: Path) -> None:
    """Refuse a parent directory in which another user could replace the run directory."""
    for status in (parent.lstat(), parent.stat()):  # of a symbolic link, too
        if status.st_uid not in (os.getuid(), 0):
            raise ConfigError(
                f"node.run_dir: {parent}, the parent of {path.name}, belongs to uid {status.st_uid} (mode "
                f"{stat.S_IMODE(status.st_mode):o}), not to you (uid {os.getuid()}) or root: remove it, or set "
                "node.run_dir or XDG_RUNTIME_DIR to a directory of your own"
            )
    if others_can_replace(status):
        raise ConfigError(
            f"node.run_dir: {parent}, the parent of {path.name}, can be written by others (uid {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}): chmod go-w it, or set node.run_dir to a directory elsewhere"
        )


def check_run_dir(path: Path) -> None:
    """Raise `ConfigError` as `RunDir.acquire` does for a directory that nodes must not use, if it exists."""
    try:
        fd = _open(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"node.run_dir: cannot use {path}: {error.strerror}") from error
    try:
        _check_private(path, os.fstat(fd))
        _check_own(path, fd)
    finally:
        os.close(fd)


def find_node(node: str | Path = "") -> NodeInfo:
    """Return the running node of that name or in that run directory; without either, the only running node.

    Raises `Unavailable` if there is none, `InvalidRequest` if there are several, `ConfigError` if other users can write
    to the directory: its content is not trusted then.
    """
    if isinstance(node, Path) or "/" in node:
        return _read(Path(node))
    running = running_nodes()
    names = ", ".join(repr(info.name) for info in running)
    if not node:
        if len(running) == 1:
            return running[0]
        if running:
            raise InvalidRequest(f"{len(running)} nodes run: {names}; select one by name or run directory", "node")
        raise Unavailable(f"no node runs in {nodes_dir()}; give the run directory of one elsewhere")
    try:
        return _read(default_run_dir(node))
    except Unavailable as error:
        raise Unavailable(f"{error.message} (running nodes: {names or 'none'})") from error


def running_nodes() -> list[NodeInfo]:
    """Return the nodes that run in this user's directory of run directories, sorted by name."""
    try:
        paths = sorted(nodes_dir().iterdir())
    except OSError:
        return []
    return [info for path in paths if (info := _running(path)) is not None]


def _running(path: Path) -> NodeInfo | None:
    try:
        return _read(path)
    except (Unavailable, ConfigError):
        return None


def _read(path: Path) -> NodeInfo:
    """Return the node that runs in a directory. Raises `Unavailable` or `ConfigError`."""
    try:
        fd = _open(path)
    except (OSError, ValueError) as error:
        raise Unavailable(f"no node runs in {path}") from error
    try:
        _check_private(path, os.fstat(fd))
        ended = _lock(fd, fcntl.LOCK_SH)  # before reading: the file may be replaced by a successor's
        info = msgspec.json.decode(read_regular(path / "node.json"), type=NodeInfo)
        if ended:
            raise Unavailable(f"no node runs in {path} (the one of pid {info.pid} has died)")
    except (OSError, msgspec.DecodeError) as error:
        raise Unavailable(f"no node runs in {path}") from error
    finally:
        os.close(fd)
    return info


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(fd: int, kind: int) -> bool:
    """Try to lock, without waiting. The lock ends with the descriptor."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, fd: int) -> bool:
    """Whether the locked directory is still the one at `path`: a stopping node may have removed it in between."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
