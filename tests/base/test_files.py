"""Files that are never there in part."""

import json
import pathlib

import pytest

from imagenet_fast import UserError
from imagenet_fast.base.files import (
    LineFile,
    check_results,
    new_path,
    read_objects,
    whole_lines,
    write_file,
    write_results,
)


def test_files_are_never_there_in_part(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    others = tmp_path / "summary.json.tmp"
    others.write_text("a user's")
    write_file(path, json.dumps({"top1": 0.5}))
    assert json.loads(path.read_text()) == {"top1": 0.5}

    def full(self, data):
        with self.open("wb") as file:
            file.write(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_file(path, json.dumps({"top1": 0.75}))
    assert caught.value.filename == str(path)  # which the system does not name
    assert json.loads(path.read_text()) == {"top1": 0.5}
    assert others.read_text() == "a user's"
    assert set(tmp_path.iterdir()) == {path, others}


def test_bytes(tmp_path):
    write_file(tmp_path / "a", b"\x00\xff\n")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_room_for_results(tmp_path):
    check_results(tmp_path / "new" / "results")
    assert list((tmp_path / "new" / "results").iterdir()) == []


def test_no_room_for_results(tmp_path):
    (tmp_path / "file").write_text("")
    told = "cannot write to .*file/results: Not a directory; choose another output_dir"
    with pytest.raises(UserError, match=told):
        check_results(tmp_path / "file" / "results")


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


def test_objects_of_damaged_files(tmp_path, capsys):
    path = tmp_path / "objects"
    assert read_objects(path, {"a": int}) == []
    path.write_bytes(
        b'{"a": 1, "b": 2}\n{"a"\nnull\n\xff\n\n{"b": 3}\n{"a": "1"}\n{"a": 4}\n{"a": 5'
    )
    assert read_objects(path, {"a": int}) == [{"a": 1, "b": 2}, {"a": 4}]
    told = f"WARNING: {path}: 6 lines are damaged and left out; 2 can be read\n"
    assert capsys.readouterr().err == told
    read_objects(path, {"a": int})
    assert capsys.readouterr().err == "", "once"
    path.write_bytes(b'{"a": 1}\n{"a": 4}')
    assert read_objects(path, {"a": int}) == [{"a": 1}, {"a": 4}]
    path.write_bytes(b'{"a": 1}\n{"a"')  # a kill's
    assert read_objects(path, {"a": int}) == [{"a": 1}]
    assert capsys.readouterr().err == ""


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


def test_lines_for_which_there_is_no_space_name_the_file(tmp_path):
    path = tmp_path / "lines"
    lines = LineFile(path, ["one"])
    with pathlib.Path("/dev/full").open("w") as full:
        lines._file, own = full, lines._file
        with pytest.raises(OSError, match=r"No space left on device: .*lines"):
            lines.add("x" * 100_000)
        lines._file = own
    lines.close()


@pytest.mark.parametrize("name", ["lr[0.1]", "run*", "why?", "a\\b"])
def test_paths_that_tensorflow_takes_for_patterns(tmp_path, name):
    with pytest.raises(UserError, match="TensorFlow does not find files again in paths with"):
        new_path(tmp_path / name / "model", "leave it")


def test_nothing_can_be_made_in_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"cannot write .*: {tmp_path}/file is no folder"):
        new_path(tmp_path / "file" / "deep" / "model", "leave it")
    assert new_path(tmp_path / "deep" / "model", "leave it") == tmp_path / "deep" / "model"
