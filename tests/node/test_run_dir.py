"""Run directories: private, exclusive to one node, found by name, reusable when stale."""

import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from ipc.native import private
from runtime.errors import ConfigError, InvalidRequest, ResourceBusy, Unavailable
from runtime.node.placement.plan import default_run_dir, nodes_dir
from runtime.node.run_dir import NodeInfo, RunDir, find_node, running_nodes

INFO = NodeInfo(name="n", pid=os.getpid(), url="http://x", control="ipc://@c", pools=("ipc://@p",), collections=("d",))


def test_a_node_is_found_while_it_runs_and_leaves_no_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    held = RunDir.acquire(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    held.write(INFO)
    assert stat.S_IMODE((path / "node.json").stat().st_mode) == 0o600
    assert [entry.name for entry in path.iterdir()] == ["node.json"]
    assert find_node(path) == find_node(str(path)) == INFO
    held.release()
    assert not path.exists()
    with pytest.raises(Unavailable, match="no node runs in"):
        find_node(path)


def test_a_node_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    held = RunDir.acquire(default_run_dir("mine"))
    held.write(INFO)
    assert find_node("mine") == INFO
    assert nodes_dir() == tmp_path / "trinity"
    held.release()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory for this test's nodes."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def running(path: Path, name: str) -> RunDir:
    held = RunDir.acquire(path)
    held.write(structs.replace(INFO, name=name))
    return held


def test_without_a_name_the_only_running_node_is_used_and_several_are_listed_in_the_error(home: Path) -> None:
    with pytest.raises(Unavailable, match="no node runs"):
        find_node()
    first, second = running(default_run_dir("b"), "b"), running(default_run_dir("a"), "a")
    elsewhere = running(home / "elsewhere", "d")
    with pytest.raises(InvalidRequest, match=r"2 nodes run: 'a', 'b'; select one by name or run directory"):
        find_node()
    with pytest.raises(Unavailable, match=r"no node runs in .*/c \(running nodes: 'a', 'b'\)"):
        find_node("c")
    first.release()
    assert find_node().name == "a"
    assert find_node(home / "elsewhere").name == "d"
    second.release()
    elsewhere.release()


def test_a_killed_node_is_no_running_one(home: Path) -> None:
    killed = running(default_run_dir("killed"), "killed")
    os.close(killed.fileno())  # as the kernel does when its process dies
    assert running_nodes() == []


@pytest.mark.parametrize(("key", "named"), [("run_dir", False), ("name", True)])
def test_a_second_node_in_a_directory_is_advised_another_one_and_the_first_is_not_disturbed(
    home: Path, key: str, named: bool
) -> None:
    path = default_run_dir("mine") if named else home / "run"
    held = RunDir.acquire(path)
    held.write(INFO)
    with pytest.raises(ResourceBusy, match=rf"a node already runs in .* another node\.{key}$"):
        RunDir.acquire(path)
    assert find_node(path) == INFO
    held.release()


def test_the_directory_of_a_killed_node_is_ignored_and_reused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    script = (
        "import os, sys, signal; from pathlib import Path; from tests.node.test_run_dir import INFO, RunDir\n"
        f"RunDir.acquire(Path({str(path)!r})).write(INFO); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -signal.SIGKILL
    assert (path / "node.json").exists()
    with pytest.raises(Unavailable, match=r"one of pid \d+ has died"):
        find_node(path)
    held = RunDir.acquire(path)
    with pytest.raises(Unavailable):  # what the killed one wrote is not taken for the new one's
        find_node(path)
    held.write(INFO)
    assert find_node(path) == INFO
    held.release()


def test_the_sockets_of_a_killed_vllm_are_removed_at_the_end_and_files_of_such_names_are_not(tmp_path: Path) -> None:
    run, theirs = tmp_path / "run", tmp_path / "run" / "data.kv"
    held = RunDir.acquire(run)
    for name in ("engine-0.kv", "engine-0.rep"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(run / name))
    theirs.touch()
    held.release()
    assert list(run.iterdir()) == [theirs]
    theirs.unlink()
    RunDir.acquire(run).release()
    assert not run.exists()


@pytest.mark.parametrize("theirs", ["kv/data", "logs/app.log", "a.sock"])
def test_a_directory_in_which_a_node_would_remove_files_of_somebody_is_refused(theirs: str, tmp_path: Path) -> None:
    kept = [tmp_path / "node.toml", tmp_path / theirs]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.raises(ConfigError, match=r"which nodes remove, beside 'node\.toml', which no node wrote"):
        RunDir.acquire(tmp_path)
    assert all(path.exists() for path in kept)
    kept[0].unlink()
    RunDir.acquire(tmp_path).release()


def test_a_directory_with_other_files_is_used_again_after_an_end_and_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "node.toml").touch()
    RunDir.acquire(tmp_path).release()
    killed = RunDir.acquire(tmp_path)
    killed.write(INFO)
    (tmp_path / "logs").mkdir()
    for name in ("frontend-0.log", "logs/pool-0.log", "kv"):  # the first one with log.directory = node.run_dir
        (tmp_path / name).touch()
    for _ in range(2):  # the second time before it has written its endpoints
        os.close(killed.fileno())
        killed = RunDir.acquire(tmp_path)
    killed.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontend-0.log", "kv", "node.toml"]
    assert (tmp_path / "kv").is_file()


@pytest.mark.parametrize(
    ("mode", "me", "says"),
    [
        (0o770, os.getuid(), r"can be written by others \(mode 770\)"),
        (0o700, os.getuid() + 1, rf"belongs to uid {os.getuid()}, not to you \(uid {os.getuid() + 1}\)"),
    ],
)
def test_a_directory_that_others_can_write_or_own_is_refused_and_ignored(
    mode: int, me: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.json").write_bytes(b"{}")
    tmp_path.chmod(mode)
    monkeypatch.setattr(os, "getuid", lambda: me)
    for use in (RunDir.acquire, find_node):
        with pytest.raises(ConfigError, match=says):
            use(tmp_path)


def private_group(monkeypatch: pytest.MonkeyPatch, *members: str) -> None:
    """The user has a group of their own name, with these members too."""
    user = SimpleNamespace(pw_name="me", pw_gid=os.getgid())
    monkeypatch.setattr(private, "pwd", SimpleNamespace(getpwuid=lambda uid: user))
    group = SimpleNamespace(gr_gid=os.getgid(), gr_name="me", gr_mem=list(members))
    monkeypatch.setattr(private, "grp", SimpleNamespace(getgrgid=lambda gid: group))


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_that_others_could_replace_is_refused_and_ignored(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = tmp_path / "holder"
    (holder / "run").mkdir(parents=True, mode=0o700)
    holder.chmod(mode)
    private_group(monkeypatch, "somebody else")
    for use in (RunDir.acquire, find_node):
        with pytest.raises(
            ConfigError, match=rf"{holder}, the parent of run, can be written by others .*mode {mode:o}"
        ):
            use(holder / "run")
    holder.chmod(mode | stat.S_ISVTX)  # like /tmp: users cannot touch each other's files
    RunDir.acquire(holder / "run").release()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make another user's directory")
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_directory_created_by_another_user_is_refused(tmp_path: Path, kind: str) -> None:
    holder = tmp_path / "holder"
    if kind == "link":
        (tmp_path / "mine").mkdir(mode=0o700)
        holder.symlink_to(tmp_path / "mine")
    else:
        holder.mkdir(mode=0o755)
    os.chown(holder, 65_532, 65_532, follow_symlinks=False)
    with pytest.raises(ConfigError, match=rf"{holder}, the parent of run, belongs to uid 65532 .*remove it, or set"):
        RunDir.acquire(holder / "run")


def test_a_created_parent_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        held = RunDir.acquire(tmp_path / "holder" / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "holder").stat().st_mode) == 0o700
    held.release()


@pytest.mark.parametrize("kind", ["a link", "a file", "under a file"])
def test_a_path_that_is_not_a_directory_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_text("")
        path = path / "below" if kind == "under a file" else path
    with pytest.raises(ConfigError, match=r"node\.run_dir: cannot use"):
        RunDir.acquire(path)
    with pytest.raises(Unavailable):
        find_node(path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": 3}', b"\xff\xff"])
def test_a_damaged_node_file_is_no_node(content: bytes, tmp_path: Path) -> None:
    held = RunDir.acquire(tmp_path / "run")
    (tmp_path / "run" / "node.json").write_bytes(content)
    with pytest.raises(Unavailable):
        find_node(tmp_path / "run")
    held.release()


def test_inspecting_a_stale_directory_does_not_block_the_next_node(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stale = RunDir.acquire(path)
    stale.write(INFO)
    os.close(stale.fileno())  # as the kernel does when its process dies

    def look(_: int) -> None:
        with contextlib.suppress(Unavailable):
            find_node(path)

    def take(_: int) -> None:
        held = RunDir.acquire(path)
        os.close(held.fileno())

    with ThreadPoolExecutor(2) as threads:
        looks = threads.map(look, range(300))
        for number in range(300):
            take(number)
        list(looks)


def test_a_directory_removed_concurrently_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    first = RunDir.acquire(path)
    lock, waiting = fcntl.flock, [True]

    def stop_first(fd: int, kind: int) -> None:
        if waiting:  # the second has opened the directory; now the first removes it and lets go
            waiting.clear()
            first.release()
        lock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", stop_first)
    second = RunDir.acquire(path)
    second.write(INFO)
    assert find_node(path) == INFO
    second.release()
