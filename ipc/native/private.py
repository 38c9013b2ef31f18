"""Whether only this user can write to a directory: trusted content, such as code, is loaded from nowhere else."""

import grp
import os
import pwd
import stat
from pathlib import Path


def is_private(directory: Path) -> bool:
    """Whether only this user and root can write to a directory, or replace it."""
    own, above = directory.stat(), directory.parent.stat()
    trusted = all(status.st_uid in (0, os.getuid()) for status in (own, above))
    return trusted and not _others_can_write(own) and not others_can_replace(above)


def others_can_replace(status: os.stat_result) -> bool:
    """Whether another user can replace what a directory contains; in a sticky one, as /tmp, only owners can."""
    return not status.st_mode & stat.S_ISVTX and _others_can_write(status)


def _others_can_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & 0o002) or (bool(status.st_mode & 0o020) and not _is_private_group(status.st_gid))


def _is_private_group(gid: int) -> bool:
    """Whether a group has no other member: systems with a private group per user make directories group-writable."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name) and set(group.gr_mem) <= {user.pw_name}
