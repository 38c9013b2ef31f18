"""A file system that drops unsynced writes at a power cut, or keeps a part of them."""

import os
import random
import shutil
from pathlib import Path

from runtime.retrieval.collections.disk import Disk


class LossyDisk(Disk):
    """Writes to a real directory and records what would survive a power cut.

    A file's content lasts as of its last sync; a name as of the last sync of its directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._contents: dict[int, bytes] = {}  # of files by inode, as synced
        self._names: dict[int, dict[str, int]] = {}  # of directories by inode, as synced
        self._kept: list[int] = []  # open: an inode must not be used again for another file

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._keep(fd)
        self._contents[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def sync_directory(self, directory: Path) -> None:
        super().sync_directory(directory)
        names = self._names_now(directory)
        self._names[directory.stat().st_ino] = {name: path.stat().st_ino for name, path in names.items()}
        for path in [directory, *names.values()]:
            fd = os.open(path, os.O_RDONLY)
            self._keep(fd)
            os.close(fd)

    def write_after_power_cut(self, target: Path, chance: random.Random) -> None:
        """Write to `target` what may be there after a power cut now."""
        self._restore(self._root.stat().st_ino, self._root, target, chance)

    def _restore(self, own: int, directory: Path | None, target: Path, chance: random.Random) -> None:
        """Restore one directory. `directory`: its current path, None if it no longer exists."""
        target.mkdir()
        names = dict(self._names.get(own, {}))
        paths = {} if directory is None else self._names_now(directory)
        now = {name: path.stat().st_ino for name, path in paths.items()}
        for name in sorted(set(names) | set(now)):  # unsynced changes may have reached the disk
            if names.get(name) != now.get(name) and chance.random() < 0.5:
                if name in now:
                    names[name] = now[name]
                else:
                    del names[name]
        for name, inode in names.items():
            path = paths[name] if now.get(name) == inode else None
            if inode in self._names or (path is not None and path.is_dir()):
                self._restore(inode, path, target / name, chance)
            else:
                (target / name).write_bytes(self._content(inode, path, chance))

    def _content(self, inode: int, path: Path | None, chance: random.Random) -> bytes:
        synced = self._contents.get(inode, b"")
        if path is None:
            return synced
        current = path.read_bytes()
        if current == synced or len(current) < len(synced):
            return chance.choice([synced, current])
        # A part of what was written since may have reached the disk.
        return chance.choice([synced, current[: chance.randint(len(synced), len(current))]])

    def _names_now(self, directory: Path) -> dict[str, Path]:
        return {path.name: path for path in directory.iterdir()}

    def _keep(self, fd: int) -> None:
        if os.fstat(fd).st_ino not in {os.fstat(kept).st_ino for kept in self._kept}:
            self._kept.append(os.dup(fd))

    def close(self) -> None:
        """Close the files kept open and remove the directory."""
        while self._kept:
            os.close(self._kept.pop())
        shutil.rmtree(self._root, ignore_errors=True)
