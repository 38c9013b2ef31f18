"""Memory of a node's processes, as if no other process ran on the machine."""

import re
from collections import Counter, defaultdict
from pathlib import Path

_PSS_ANON = re.compile(r"Pss_Anon: +(\d+) kB")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) (\d+)")


def proportional_bytes(pids: dict[str, int]) -> dict[str, int]:
    """Pss by process, the pages of a mapped file shared among these processes alone.

    The kernel's own Pss divides by all processes that map a file, so torch would weigh nothing where other nodes run.
    Anonymous pages are shared by nobody but a node's processes, which are forked from one.
    """
    own: dict[str, int] = {}
    files: dict[str, dict[tuple[str, str], int]] = {}
    for name, pid in pids.items():
        own[name] = int(_PSS_ANON.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())[0]) << 10
        files[name] = _mapped(Path(f"/proc/{pid}/smaps").read_text())
    holders = Counter(file for held in files.values() for file in held)
    return {name: own[name] + sum(size // holders[file] for file, size in files[name].items()) for name in pids}


def _mapped(smaps: str) -> dict[tuple[str, str], int]:
    """Bytes of each file by device and inode (proc(5), smaps)."""
    files = defaultdict[tuple[str, str], int](int)
    file, resident = ("", "0"), 0
    for line in smaps.splitlines():
        if found := _MAPPING.match(line):
            file = (found[1], found[2])
        elif line.startswith("Rss:"):
            resident = int(line.split()[1]) << 10
        elif line.startswith("Anonymous:"):
            anonymous = int(line.split()[1]) << 10
            if file[1] != "0":
                files[file] += resident - anonymous
    return files
