"""``--allow_outside`` of ``prepare``."""

import io

import numpy as np
from PIL import Image

from imagenet_fast import commands
from imagenet_fast.data import records
from imagenet_fast.data.examples import FILENAME, decode_example


def jpeg(number):
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(file, "JPEG")
    return file.getvalue()


def test_files_outside_of_the_lists_folder_need_the_flag(tmp_path, capsys):
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "private.jpg").write_bytes(jpeg(1))
    (folder / "own.jpg").write_bytes(jpeg(2))
    (folder / "list.csv").write_text(
        "image,label,split\n../private.jpg,x,train\nown.jpg,x,validation\n"
    )
    arguments = [
        "prepare",
        "--source=list",
        f"--source_path={folder / 'list.csv'}",
        f"--data_dir={tmp_path / 'out'}",
        "--nojpeg_index",
    ]
    assert commands.run(arguments) == 2
    assert "private.jpg, line 2); give --allow_outside if you know" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert commands.run([*arguments, "--allow_outside"]) == 0
    (shard,) = (tmp_path / "out").glob("train-*")
    (record,) = records.read_records(shard)
    assert decode_example(record)[FILENAME] == [b"../private.jpg"]


def test_other_sources_do_not_have_the_flag(tmp_path, capsys):
    arguments = ["prepare", "--source=folders", f"--source_path={tmp_path}", "--allow_outside"]
    assert commands.run([*arguments, f"--data_dir={tmp_path / 'out'}"]) == 2
    assert "the source 'folders' has no allow_outside" in capsys.readouterr().err
