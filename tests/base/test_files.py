"""Atomic file writes and line files."""

import io
import json
import os
import pathlib

import pytest

from imagenet_fast import UserError
from imagenet_fast.base import files
from imagenet_fast.base.files import (
    LineFile,
    check_results,
    new_path,
    open_new,
    open_to_append,
    read_objects,
    whole_lines,
    write_file,
    write_results,
)


def test_writes_are_atomic(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    others = tmp_path / "summary.json.tmp"
    others.write_text("a user's")
    write_file(path, json.dumps({"top1": 0.5}))
    assert json.loads(path.read_text()) == {"top1": 0.5}

    class Full(io.FileIO):
        def write(self, data):
            super().write(data[:3])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "open_new", lambda path: Full(path, "xb"))
    with pytest.raises(OSError, match="No space left") as caught:
        write_file(path, json.dumps({"top1": 0.75}))
    assert caught.value.filename == str(path)  # which the system does not name
    assert json.loads(path.read_text()) == {"top1": 0.5}
    assert others.read_text() == "a user's"
    assert set(tmp_path.iterdir()) == {path, others}


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_file(tmp_path / "report.html", "text")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "report.html"), None)


def test_bytes(tmp_path):
    write_file(tmp_path / "a", b"\x00\xff\n")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_check_results_creates_the_directory(tmp_path):
    check_results(tmp_path / "new" / "results")
    assert list((tmp_path / "new" / "results").iterdir()) == []


def test_check_results_refuses_an_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    message = "cannot write to .*file/results: Not a directory; choose another output_dir"
    with pytest.raises(UserError, match=message):
        check_results(tmp_path / "file" / "results")


def test_lines_are_written_at_once_and_whole(tmp_path):
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


def test_damaged_lines_are_skipped(tmp_path, capsys):
    path = tmp_path / "objects"
    assert read_objects(path, {"a": int}) == []
    path.write_bytes(
        b'{"a": 1, "b": 2}\n{"a"\nnull\n\xff\n\n{"b": 3}\n{"a": "1"}\n{"a": 4}\n{"a": 5'
    )
    assert read_objects(path, {"a": int}) == [{"a": 1, "b": 2}, {"a": 4}]
    warning = f"WARNING: {path}: 6 lines are damaged and skipped; 2 can be read\n"
    assert capsys.readouterr().err == warning
    read_objects(path, {"a": int})
    assert capsys.readouterr().err == "", "once"
    path.write_bytes(b'{"a": 1}\n{"a": 4}')
    assert read_objects(path, {"a": int}) == [{"a": 1}, {"a": 4}]
    path.write_bytes(b'{"a": 1}\n{"a"')  # As after a kill.
    assert read_objects(path, {"a": int}) == [{"a": 1}]
    assert capsys.readouterr().err == ""


def test_a_failed_write_keeps_the_old_lines(tmp_path, monkeypatch):
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


def test_unwritable_results(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file"):
        write_results(tmp_path / "file", {"a.csv": ""})


def test_existing_paths_are_refused(tmp_path):
    assert new_path(tmp_path / "new", "choose another") == tmp_path / "new"
    with pytest.raises(UserError, match=f"{tmp_path} already exists; remove it, or choose another"):
        new_path(tmp_path, "choose another")


def test_errors_of_a_full_disk_name_the_file(tmp_path):
    path = tmp_path / "lines"
    lines = LineFile(path, ["one"])
    with pathlib.Path("/dev/full").open("w") as full:
        lines._file, file = full, lines._file
        with pytest.raises(OSError, match=r"No space left on device: .*lines"):
            lines.add("x" * 100_000)
        lines._file = file
    lines.close()


@pytest.mark.parametrize("name", ["lr[0.1]", "run*", "why?", "a\\b"])
def test_paths_with_glob_characters_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="TensorFlow cannot read files from paths with"):
        new_path(tmp_path / name / "model", "leave it")


def test_paths_below_a_file_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"cannot write .*: {tmp_path}/file is not a writable dire"):
        new_path(tmp_path / "file" / "deep" / "model", "leave it")
    assert new_path(tmp_path / "deep" / "model", "leave it") == tmp_path / "deep" / "model"


def test_links_are_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name, target in (("link", "precious"), ("dangling", "new")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(FileExistsError):
            open_new(tmp_path / name)
        with pytest.raises(OSError, match="is a link, through which nothing is written"):
            open_to_append(tmp_path / name)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_a_file_of_too_many_lines(tmp_path, monkeypatch):
    """256 MiB of line feeds would take 5 GB."""
    monkeypatch.setattr(files, "_MOST_LINES", 3)
    path = tmp_path / "objects"
    path.write_text("{}\n" * 3)
    assert read_objects(path, {}) == [{}] * 3
    path.write_text("{}\n" * 4)
    for read in (whole_lines, lambda path: read_objects(path, {})):
        with pytest.raises(OSError, match="has more than 3 lines") as found:
            read(path)
        assert found.value.filename == str(path)


def test_pipes_are_not_appended_to(tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(OSError, match="not a regular file"):
        open_to_append(tmp_path / "file")


def test_a_file_to_append_to(tmp_path):
    for text in (b"one\n", b"two\n"):
        with open_to_append(tmp_path / "file") as file:
            file.write(text)
            file.seek(0)
            content = file.read()
    assert content == b"one\ntwo\n"


def test_values_of_other_types_are_skipped(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": "high"}\n{"step": 3}\n')
    assert [row["step"] for row in read_objects(path, {"step": int}, float)] == [1, 3]
    assert "1 line is damaged and skipped; 2 can be read" in capsys.readouterr().err
