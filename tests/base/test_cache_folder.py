"""The folder for compiled code, which others must not be able to change."""

import grp
import os
import pathlib
import pwd
import stat

import pytest

from imagenet_fast.base import cache_folder as module
from imagenet_fast.base.cache_folder import cache_folder
from imagenet_fast.base.notices import warn_once


@pytest.fixture
def home(tmp_path, monkeypatch):
    warn_once.cache_clear()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_made_for_this_user_alone(home):
    folder = cache_folder()
    assert folder == home / "cache" / "imagenet_fast"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)  # of an earlier version
    assert cache_folder() == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("given", ["", "cache", "./cache"])
def test_a_relative_one_is_ignored(home, monkeypatch, given):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache_folder() == home / "home" / ".cache" / "imagenet_fast"
    assert not (home / "cache").exists()


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_one_that_others_can_write_is_not_used(home, capsys, mode):
    folder = cache_folder()
    folder.chmod(mode)
    assert cache_folder() is None
    assert f"{folder} can be written by others; remove it" in capsys.readouterr().err
    assert stat.S_IMODE(folder.stat().st_mode) == mode


def test_one_in_a_folder_that_others_can_write_is_not_used(home, capsys):
    folder = cache_folder()
    folder.parent.chmod(0o777)
    assert cache_folder() is None
    assert "where others can replace it" in capsys.readouterr().err
    folder.parent.chmod(0o1777)  # as /tmp
    assert cache_folder() == folder


@pytest.mark.parametrize("members", [[], ["somebody"], None])
def test_one_in_a_folder_of_a_group_is_not_used(home, monkeypatch, capsys, members):
    folder = cache_folder()
    folder.parent.chmod(0o775)
    name = "staff" if members is None else pwd.getpwuid(os.geteuid()).pw_name
    entry = grp.struct_group((name, "x", folder.parent.stat().st_gid, members or []))
    monkeypatch.setattr(module.grp, "getgrgid", lambda _: entry)
    if members == []:  # The user's private group, which many distributions give new files.
        assert cache_folder() == folder
        return
    assert cache_folder() is None
    assert "where others can replace it" in capsys.readouterr().err
    folder.parent.chmod(0o1775)
    assert cache_folder() == folder


@pytest.mark.parametrize("changed", ["folder", "parent"])
def test_one_of_another_user_is_not_used(home, monkeypatch, capsys, changed):
    folder = cache_folder()
    user, real = os.geteuid(), os.stat

    def foreign(path, **options):
        values = list(real(path, **options))
        if pathlib.Path(path) == (folder if changed == "folder" else folder.parent):
            values[4] = user + 1000
        return os.stat_result(values)

    monkeypatch.setattr(pathlib.Path, "lstat", lambda path: foreign(path, follow_symlinks=False))
    monkeypatch.setattr(pathlib.Path, "stat", foreign)
    reason = module.reason_to_distrust(folder)
    assert ("belongs to another user" if changed == "folder" else "others can replace") in reason


def test_a_link_is_not_used(home, capsys):
    (home / "elsewhere").mkdir()
    (home / "cache").mkdir()
    (home / "cache" / "imagenet_fast").symlink_to(home / "elsewhere")
    assert cache_folder() is None
    assert "is a link or a file" in capsys.readouterr().err


def test_without_a_place_for_it(home, capsys):
    (home / "cache").write_text("a file")
    assert cache_folder() is None
    assert "native ops are compiled anew by each process" in capsys.readouterr().err
