"""Runs all commands and code of docs/how_do_i.md, in order and as written, in one empty folder."""

import io
import json
import pathlib
import re
import shlex
import tarfile

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_digits

from imagenet_fast.data.records import write_records

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = "from imagenet_fast.__main__ import main; main()"
PAGE = (ROOT / "docs" / "how_do_i.md").read_text()
# Commands, indented, with continuation lines; or Python.
BLOCK = re.compile(r"^```python\n(.*?)^```$|((?:^    [^\n]+\n)+)", re.MULTILINE | re.DOTALL)


def answers():
    """Yields (heading, Python code or "", commands) of each block."""
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE):
        for code, commands in BLOCK.findall(section):
            joined = commands.replace("\\\n", " ").splitlines()
            yield section.splitlines()[0], code, [shlex.split(line) for line in joined]


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def write_photos(folder):
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 256, (40, 50, 3), np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.jpg")
    # What else they show.
    names = [f"{label}/{number}.jpg" for label in ("cat", "dog") for number in range(12)]
    lines = [
        f'photos/{name},"{name[:3]},{("day", "night")[n % 2]}"' for n, name in enumerate(names)
    ]
    (folder.parent / "scenes.csv").write_text("\n".join(["image,labels", *lines]) + "\n")


def write_cifar(path):
    """The archive of the binary version, with four images in each file."""
    random = np.random.default_rng(0)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    files = {name: random.integers(0, 10, (4, 3073), np.uint8).tobytes() for name in names}
    files["batches.meta.txt"] = "\n".join(map(str, range(10))).encode()
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_tfds(folder):
    """scikit-learn's digits, as TensorFlow Datasets stores them."""
    digits = load_digits()
    records = []
    for image, label in zip(digits.images[:200], digits.target):
        example = tf.train.Example()
        features = example.features.feature
        features["image"].bytes_list.value.append(png((image * 15.9).astype(np.uint8)))
        features["label"].int64_list.value.append(label)
        records.append(example.SerializeToString())
    folder.mkdir(parents=True)
    parts = {"train": records[:100], "test": records[100:]}
    for split, members in parts.items():
        write_records(folder / f"numbers-{split}.tfrecord-00000-of-00001", members)
    splits = [{"name": name, "shardLengths": [str(len(part))]} for name, part in parts.items()]
    info = {"name": "numbers", "fileFormat": "tfrecord", "splits": splits}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    label = {"classLabel": {"numClasses": "10"}}
    features = {"featuresDict": {"features": {"image": {}, "label": label}}}
    (folder / "features.json").write_text(json.dumps(features))
    (folder / "label.labels.txt").write_text("\n".join(map(str, range(10))) + "\n")


def test_the_page_is_read():
    found = list(answers())
    assert len(found) > 10
    assert any("LARS" in code for _, code, _ in found)
    assert [command[:2] for _, _, commands in found for command in commands][:2] == [
        ["imagenet-fast", "prepare"],
        ["imagenet-fast", "train"],
    ]


@pytest.mark.slow
@pytest.mark.long
def test_all_answers(tmp_path, monkeypatch, run_python):
    write_photos(tmp_path / "photos")
    write_cifar(tmp_path / "cifar-10-binary.tar.gz")
    write_tfds(tmp_path / "tensorflow_datasets" / "numbers" / "1.0.0")
    monkeypatch.chdir(tmp_path)
    here = f"import os; os.chdir({str(tmp_path)!r})\n"
    for heading, code, commands in answers():
        if code:
            run_python(["-c", here + code])
        for program, *arguments in commands:
            if program == "tensorboard":  # would not end
                continue
            assert program == "imagenet-fast", heading
            expanded = [path for argument in arguments for path in _expanded(argument)]
            finished = run_python(["-c", here + PROGRAM, *expanded], check=False)
            assert finished.returncode == 0, (heading, finished.stderr)
    for name in ("digits", "early", "cpu", "cosine", "batch64", "mine"):
        assert "top1" in json.loads((tmp_path / "runs" / name / "summary.json").read_text())


def _expanded(argument):
    """An argument as the shell gives it to the program."""
    return [str(path) for path in sorted(pathlib.Path().glob(argument))] or [argument]
