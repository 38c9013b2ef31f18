"""The directory of a running node: `node.json`, which tells where to ask it, and its logs; gone when it has stopped.

The directory is private to the user, and lies in one where nobody but root could put another in its place. It is locked
for as long as its supervisor lives: the kernel lets go of the lock when the process ends, however it ends, so a stale
directory never stops the next start. One that lies elsewhere than the user's other nodes has a link among them, `@` and
a hash of its path, by which it is found and listed.
"""

import contextlib
import fcntl
import grp
import hashlib
import logging
import os
import pwd
import shutil
import stat
import time
from pathlib import Path

import msgspec

from runtime.errors import ConfigError, InvalidRequest, ResourceBusy, Unavailable
from runtime.node.config import Doorbell
from runtime.node.placement.plan import ANSWERS_FOLDER, KV_FOLDER, default_run_dir, nodes_dir
from runtime.node.remote_config import RemoteSection

_PAUSE_S = 0.01  # so that whoever looks, and was put aside by the kernel meanwhile, comes to its end
LOGS = "logs"  # the folder of its processes' logs, unless they are kept elsewhere
_TRIES = 300  # to have the lock: each fails only while somebody else's look at the directory, or its removal, lasts

log = logging.getLogger("supervisor")


class NodeInfo(msgspec.Struct, frozen=True):
    """What other processes of the user need to talk to a node, and to read its logs.

    `pools` are the endpoints of its vector-pool workers, `logs` is the directory of its logs, `paths` are those of its
    collections, in their order. `doorbell`: how its pools and their clients wake each other. `remote`: its collections
    on other nodes.
    """

    name: str
    pid: int
    url: str
    control: str
    pools: tuple[str, ...]
    collections: tuple[str, ...]
    logs: str = ""
    paths: tuple[str, ...] = ()
    doorbell: Doorbell = "eventfd"
    remote: tuple[RemoteSection, ...] = ()


def collection_paths(info: NodeInfo) -> dict[str, str]:
    """Where a node's collections lie, by their names."""
    return dict(zip(info.collections, info.paths, strict=False))


class RunDir:
    """A locked run directory. `acquire` refuses one that another live node holds, or that others could write."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def fileno(self) -> int:
        """Of the locked directory: who closes it has let go of the lock, as the kernel does when a process dies."""
        return self._fd

    @classmethod
    def acquire(cls, path: Path) -> "RunDir":
        """Make the directory and lock it. Raises `ConfigError`, and `ResourceBusy` where a node runs already."""
        missing: OSError | None = None
        for _ in range(_TRIES):
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.mkdir(mode=0o700, exist_ok=True)
                fd = _open(path)
            except FileNotFoundError as error:  # removed under our hands by a node that stops
                missing = error
                continue
            except OSError as error:
                raise ConfigError(f"node.run_dir: cannot use {path}: {error.strerror}") from error
            try:
                _check_private(path, os.fstat(fd))
                if _lock(fd, fcntl.LOCK_EX):
                    with contextlib.suppress(FileNotFoundError):  # of one that was killed; at once: others read it
                        os.unlink("node.json", dir_fd=fd)
                    if _is_at(path, fd):
                        _remove_left(path)
                        return cls(path, fd)
                elif not _lock(fd, fcntl.LOCK_SH):  # else it was a `find_node` that looked, and will let go
                    key = "node.name" if path == default_run_dir(path.name) else "node.run_dir"
                    raise ResourceBusy(f"a node already runs in {path}; stop it, or give this one another {key}")
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            time.sleep(_PAUSE_S)
        raise ResourceBusy(f"node.run_dir: cannot use {path}: {missing.strerror if missing else 'it is in use'}")

    def write(self, info: NodeInfo) -> None:
        """Publish the node: whole or not at all."""
        temporary = self.path / ".node.json"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(info))
        temporary.rename(self.path / "node.json")
        with contextlib.suppress(OSError):  # without a link it is found by its directory alone
            self._link_up()

    def _link_up(self) -> None:
        directory = nodes_dir()
        if self.path.parent == directory:
            return
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for link in directory.glob("@*"):  # of nodes that were killed, this one's predecessor too
            if _running(link.readlink()) is None or link == _link(self.path):
                link.unlink(missing_ok=True)
        _link(self.path).symlink_to(self.path.absolute())

    def release(self) -> None:
        """Remove the directory and let the lock go."""
        with contextlib.suppress(OSError):
            _link(self.path).unlink(missing_ok=True)
        for file in (
            self.path / "node.json",
            self.path / ".node.json",
            *self._left_by_engines(),
            *(self.path / LOGS).glob("*.log*"),
        ):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s is left behind: %s", file, error.strerror)
        _remove_left(self.path)
        with contextlib.suppress(OSError):
            (self.path / LOGS).rmdir()
        with contextlib.suppress(OSError):  # somebody put a file of their own there: theirs to remove
            self.path.rmdir()
        with contextlib.suppress(OSError):
            nodes_dir().rmdir()  # empty if this was the last node
        os.close(self._fd)

    def _left_by_engines(self) -> list[Path]:
        return [found for pattern in ("*.sock", "*.sock.old", "*.prom", "*.new") for found in self.path.glob(pattern)]


def _remove_left(run_dir: Path) -> None:
    """KV and stored answers end with their node; one that was killed while it made their folder has left that too."""
    for left in (run_dir / KV_FOLDER, *run_dir.glob(f"{ANSWERS_FOLDER}*")):
        shutil.rmtree(left, ignore_errors=True)


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        raise ConfigError(f"node.run_dir: {path} belongs to uid {status.st_uid}, not to you (uid {os.getuid()})")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(
            f"node.run_dir: {path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it"
        )
    _check_holder(path.absolute().parent, path)


def _check_holder(holder: Path, path: Path) -> None:
    """Refuse a directory in which somebody else could put another run directory in the place of this user's."""
    for status in (holder.lstat(), holder.stat()):  # of the link, if it is one, and of the directory
        if status.st_uid not in (os.getuid(), 0):
            raise ConfigError(
                f"node.run_dir: {holder}, which holds {path.name}, belongs to uid {status.st_uid} (mode "
                f"{stat.S_IMODE(status.st_mode):o}), not to you (uid {os.getuid()}) or root: remove it, or set "
                "node.run_dir or XDG_RUNTIME_DIR to a directory of your own"
            )
    if _written_by_others(status):
        raise ConfigError(
            f"node.run_dir: {holder}, which holds {path.name}, can be written by others (uid {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}): chmod go-w it, or set node.run_dir to a directory elsewhere"
        )


def _written_by_others(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_ISVTX:  # in a sticky one, as /tmp, each has their own
        return False
    return bool(status.st_mode & 0o002) or (bool(status.st_mode & 0o020) and not _of_own(status.st_gid))


def _of_own(gid: int) -> bool:
    """Whether a group has this user alone, as many systems make one for each: there all is group-writable."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name) and set(group.gr_mem) <= {user.pw_name}


def find_node(node: str | Path = "") -> NodeInfo:
    """The running node of that name or in that run directory; without either, the only one that runs.

    Raises `Unavailable` if there is none, `InvalidRequest` if there are several, `ConfigError` if the directory is not
    this user's alone: what it says could be anybody's then.
    """
    if isinstance(node, Path) or "/" in node:
        return _read(Path(node))
    running = running_nodes()
    found = {path: info for path, info in running.items() if node in ("", info.name)}
    if len(found) > 1:
        which = ", ".join(f"{info.name!r} in {path}" for path, info in found.items())
        raise InvalidRequest(f"{len(found)} nodes run: {which}; say which one is meant", "node")
    if found:
        return next(iter(found.values()))
    if not node:
        raise Unavailable(f"no node runs: there is none in {nodes_dir()}, nor a link to one")
    names = ", ".join(sorted(repr(info.name) for info in running.values())) or "none"
    try:
        return _read(default_run_dir(node))
    except Unavailable as error:
        raise Unavailable(f"{error.message}, and no node elsewhere has that name (running: {names})") from error


def running_nodes() -> dict[Path, NodeInfo]:
    """The nodes of this user that run now, by their run directories, in the order of their names."""
    try:
        entries = sorted(nodes_dir().iterdir())
    except OSError:
        return {}
    paths = [entry.readlink() if entry.is_symlink() else entry for entry in entries]
    found = {path: info for path in paths if (info := _running(path)) is not None}
    return dict(sorted(found.items(), key=lambda item: (item[1].name, item[0])))


def _running(path: Path) -> NodeInfo | None:
    try:
        return _read(path)
    except (Unavailable, ConfigError):
        return None


def _link(path: Path) -> Path:
    return nodes_dir() / f"@{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]}"


def _read(path: Path) -> NodeInfo:
    """The node that runs in that directory. Raises `Unavailable` or `ConfigError`."""
    try:
        fd = _open(path)
    except (OSError, ValueError) as error:
        raise Unavailable(f"no node runs in {path}") from error
    try:
        _check_private(path, os.fstat(fd))
        ended = _lock(fd, fcntl.LOCK_SH)  # first: what is read before may be of one that has a successor by then
        info = msgspec.json.decode((path / "node.json").read_bytes(), type=NodeInfo)
        if ended:
            raise Unavailable(f"no node runs in {path} (one of pid {info.pid} died there)")
    except (OSError, msgspec.DecodeError) as error:
        raise Unavailable(f"no node runs in {path}") from error
    finally:
        os.close(fd)
    return info


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(fd: int, kind: int) -> bool:
    """Whether the lock could be had. It goes with the descriptor."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, fd: int) -> bool:
    """Whether the locked directory is still the one of that name, and not one that a stopping node has removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
