"""Files that are never there in part."""

import json
import pathlib

import pytest

from imagenet_fast import UserError
from imagenet_fast.files import LineFile, new_path, whole_lines, write_file, write_results


def test_files_are_never_there_in_part(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_file(path, json.dumps({"top1": 0.5}))
    assert json.loads(path.read_text()) == {"top1": 0.5}

    def full(self, text):
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, json.dumps({"top1": 0.75}))
    assert json.loads(path.read_text()) == {"top1": 0.5}


def test_bytes(tmp_path):
    write_file(tmp_path / "a", b"\x00\xff\n")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_lines_are_there_at_once_and_as_a_whole(tmp_path):
    path = tmp_path / "lines"
    assert whole_lines(path) == []
    path.write_text("old\n")
    lines = LineFile(path, ["one", "two"])
    assert whole_lines(path) == ["one", "two"]
    lines.add("three")
    assert whole_lines(path) == ["one", "two", "three"]
    lines.close()
    with path.open("a") as file:
        file.write("fo")
    assert whole_lines(path) == ["one", "two", "three"]
    assert list(tmp_path.iterdir()) == [path]


def test_lines_that_cannot_be_written_leave_those_that_are_there(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    path.write_text("old\n")

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        LineFile(path, ["new"])
    assert whole_lines(path) == ["old"]


def test_results(tmp_path):
    texts = {"a.csv": "1,2\n", "b.svg": "<svg/>"}
    paths = write_results(tmp_path / "new" / "folder", texts)
    assert [pathlib.Path(path).name for path in paths] == list(texts)
    assert [pathlib.Path(path).read_text() for path in paths] == list(texts.values())
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 2


def test_results_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file"):
        write_results(tmp_path / "file", {"a.csv": ""})


def test_a_path_where_something_is_already(tmp_path):
    assert new_path(tmp_path / "new", "choose another") == tmp_path / "new"
    with pytest.raises(UserError, match=f"{tmp_path} exists already; remove it, or choose another"):
        new_path(tmp_path, "choose another")
