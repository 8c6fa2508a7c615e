"""Files that are never there in part."""

import json
import pathlib

import pytest

from imagenet_fast import UserError
from imagenet_fast.files import write_file, write_results


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
