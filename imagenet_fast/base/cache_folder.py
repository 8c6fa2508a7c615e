"""This user's own folder for compiled code, from which nobody else's code is loaded."""

from __future__ import annotations

import grp
import os
import pathlib
import pwd
import stat

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.paths import to_local_path

_NAME = "imagenet_fast"


def cache_folder(users: str = "native ops are") -> pathlib.Path | None:
    """Returns ``imagenet_fast`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``; creates it.

    A relative ``XDG_CACHE_HOME`` is ignored, as the XDG Base Directory Specification demands.
    None, after a warning, if the folder cannot be made, or if others can write to it.

    Args:
      users: what each process compiles without it, for the warning.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = given if pathlib.Path(given).is_absolute() else "~/.cache"
        folder = to_local_path(home, "XDG_CACHE_HOME") / _NAME
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = reason_to_distrust(folder)
        if not reason:
            folder.chmod(0o700)
    except (OSError, UserError) as error:
        folder, reason = pathlib.Path(given or "~/.cache", _NAME), str(error)
    if reason:
        warn_once(
            f"{users} compiled anew by each process, because {folder} {reason}; remove it, "
            "or set XDG_CACHE_HOME to a folder of your own"
        )
        return None
    return folder


def reason_to_distrust(folder: pathlib.Path) -> str:
    """Returns why others can change what is in a folder; empty: they cannot."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is a link or a file"
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others"
    above = folder.parent.stat()
    shared = bool(above.st_mode & stat.S_IWOTH)
    if above.st_mode & stat.S_IWGRP and not _is_private(above.st_gid):
        shared = True
    if (shared and not above.st_mode & stat.S_ISVTX) or above.st_uid not in (0, os.geteuid()):
        return f"is in {folder.parent}, where others can replace it"
    return ""


def _is_private(group: int) -> bool:
    """Whether a group is this user's alone, as that of new files is in many distributions."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}
