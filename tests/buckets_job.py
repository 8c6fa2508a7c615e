"""What is tried with buckets, in a process of its own, whose TensorFlow talks to the fake.

Argument: the path of a JSON object for the function of this module that its ``do`` names.
"""

import contextlib
import io
import json
import os
import pathlib
import sys
import time
import traceback

import keras
import numpy as np

from imagenet_fast import Config, commands, evaluate, export, train
from imagenet_fast.base.files import LineFile, write_file, write_results
from imagenet_fast.base.paths import BucketError, to_path
from imagenet_fast.data.prepare.page import write_page
from imagenet_fast.serving.predict import predict


def use(job):
    """Trains, with local folders and with buckets, and then uses what has become of the latter."""
    for name in ("local", "bucket"):
        train(Config(**job[name]))
    config = Config(**job["bucket"])
    found = {"evaluated": evaluate(config)}
    export(config, job["exported"])
    found["predicted"] = list(predict(job["exported"], job["images"]))
    pathlib.Path(job["out"]).write_text(json.dumps(found))


def look(job):
    """Makes the page on the images in a bucket, and uses paths."""
    write_page(job["look"])
    pathlib.Path(job["out"]).write_text(json.dumps(use_paths(job)))


def die(job):
    """Trains, and ends at a step, and with it the process, without a word."""

    class Kill(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_begin(self, batch, logs=None):
            if self.steps == job["killed_at"]:
                os._exit(9)
            self.steps += 1

    train(Config(**job["killed"]), callbacks=[Kill()])


def use_paths(job):
    """Uses a folder, and then runs commands that end with an error, each with its seconds."""
    told = []
    try:
        use_folder(to_path(job["folder"]))
    except Exception:
        told.append(traceback.format_exc())
    else:
        told.append("")
    for command in job["commands"]:
        stderr, start = io.StringIO(), time.monotonic()
        with contextlib.redirect_stderr(stderr):
            status = commands.run(command)
        told.append([status, stderr.getvalue(), time.monotonic() - start])
    return told


def use_folder(folder):
    """Does with a folder in a bucket what the package does with one on disk."""
    assert not folder.exists() and not folder.is_dir() and list(folder.glob("*")) == []
    (folder / "run").mkdir(parents=True, exist_ok=True)
    (folder / "run").mkdir(parents=True, exist_ok=True)
    assert folder.is_dir() and (folder / "run").is_dir() and not (folder / "run").is_file()
    assert list(folder.iterdir()) == [folder / "run"] and list((folder / "run").iterdir()) == []

    write_file(folder / "text", "größer\n")
    write_file(folder / "text", "größer als\n")
    write_file(folder / "empty", "")
    numbers = np.arange(300_000, dtype=np.uint32).tobytes()
    write_file(folder / "bytes", numbers)
    assert (folder / "text").read_text() == "größer als\n"
    assert (folder / "empty").is_file() and (folder / "empty").read_bytes() == b""
    assert (folder / "bytes").stat().st_size == len(numbers)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["bytes", "empty", "run", "text"], "nothing is left beside them"
    assert list(folder.glob("*t")) == [folder / "text"]

    with (folder / "bytes").open("rb") as file:
        assert file.read(8) == numbers[:8] and file.tell() == 8
        assert file.seek(-5, os.SEEK_END) == len(numbers) - 5 and file.read() == numbers[-5:]
        assert file.seek(400_000) == 400_000 and file.read(100_000) == numbers[400_000:500_000]
        assert file.seek(len(numbers) + 100) and file.read(10) == b""
        assert file.seek(3) == 3 and file.read() == numbers[3:]

    lines = LineFile(folder / "lines", ["one"])
    lines.add("two")
    assert (folder / "lines").read_text() == "one\n", "each upload takes all lines"
    lines.flush()
    assert (folder / "lines").read_text() == "one\ntwo\n"
    lines.add("three")
    lines.close()
    assert (folder / "lines").read_text() == "one\ntwo\nthree\n"
    with (folder / "lines").open("a") as file:
        file.write("four\n")
    assert (folder / "lines").read_text() == "one\ntwo\nthree\nfour\n"

    (folder / "lines").unlink()
    (folder / "lines").unlink(missing_ok=True)
    for attempt in (folder / "lines").unlink, (folder / "lines").read_bytes, (folder / "no").stat:
        try:
            attempt()
        except FileNotFoundError as error:
            assert isinstance(error, BucketError) and error.strerror == "No such file or directory"
        else:
            raise AssertionError(attempt)
    assert write_results(folder / "new", {"a.txt": "a", "b.txt": "b"}) == [
        f"{folder}/new/a.txt",
        f"{folder}/new/b.txt",
    ]
    (folder / "new").replace(folder / "newer")
    assert not (folder / "new").exists()
    assert (folder / "newer" / "b.txt").read_text() == "b"


if __name__ == "__main__":
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    {"use": use, "look": look, "die": die}[job["do"]](job)
