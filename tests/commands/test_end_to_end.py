"""The command line in processes of its own: from a data set to predictions, and its mistakes."""

import io
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import types

import numpy as np
import PIL.Image
import pytest
from PIL import Image

from imagenet_fast import commands
from imagenet_fast.data.examples import ENCODED, FILENAME, LABEL, decode_example
from imagenet_fast.data.records import read_records

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = (
    "train",
    "--model=resnet8",
    "--image_size=16",
    "--train_crop=none",
    "--noflip",
    "--pixel_mean=77.9,77.9,77.9",
    "--pixel_std=95.9,95.9,95.9",
    "--batch_size=32",
    "--learning_rate_batch=32",
    "--warmup=0 steps",
    "--duration=2 epochs",
    "--decay_at=1 epoch",
    "--strategy=one_device",
)


@pytest.fixture(scope="module")
def command(run_python_session):
    """Runs a command and returns the finished process; its status must be as expected."""

    def run(*arguments, status=0, **options):
        finished = run_python_session(["-m", "imagenet_fast", *arguments], check=False, **options)
        assert finished.returncode == status, finished.stdout + finished.stderr
        return finished

    return run


@pytest.fixture(scope="module")
def journey(command, tmp_path_factory):
    """What the commands print, one after the other, and the directory in which they work."""
    folder = tmp_path_factory.mktemp("journey")
    data, run, model = (str(folder / name) for name in ("data", "run", "model"))
    outputs = types.SimpleNamespace(folder=folder)
    outputs.prepare = command("prepare", "--source=digits", f"--data_dir={data}")
    outputs.train = command(*TRAIN, f"--data_dir={data}", f"--model_dir={run}")
    outputs.evaluate = command("evaluate", f"--model_dir={run}", "--json")
    outputs.export = command("export", f"--model_dir={run}", f"--saved_model={model}")
    images, labels = [], []
    for path in sorted((folder / "data").glob("validation-*")):
        for number, record in enumerate(read_records(path)):
            example = decode_example(record)
            images.append(folder / f"{path.name}-{number}.jpg")
            images[-1].write_bytes(example[ENCODED][0])
            labels.append(int(example[LABEL][0]))
    outputs.images, outputs.labels = list(map(str, images)), labels
    outputs.predict = command("predict", f"--saved_model={model}", "--json", *outputs.images)
    return outputs


def test_prepare(journey):
    assert journey.prepare.stdout.splitlines()[-1] == (
        f"{journey.folder}/data: digits, 10 classes, 1,438 train images, 359 validation images"
    )


def test_train(journey):
    summary = json.loads((journey.folder / "run" / "summary.json").read_text())
    assert journey.train.stdout.count("\n") == 1
    assert journey.train.stdout.startswith(f"top-1 {summary['top1']:.2%}, 2 epochs in ")
    assert journey.train.stdout.endswith(f"images/s; {journey.folder}/run/report.html\n")
    told = journey.train.stderr
    assert (
        f"resnet8 on digits (1438 training images, 10 classes), {summary['runs_on']}, float32; "
        "batch 32 = 1 x 32; 88 steps of 44 an epoch"
    ) in told
    assert summary["runs_on"] == f"1 CPU ({summary['hardware']['cpu']})"
    assert f"epoch 2: validation top-1 {summary['top1']:.2%}" in told
    assert summary["command"].startswith("imagenet-fast train --model=resnet8 --image_size=16 ")
    assert "'--warmup=0 steps'" in summary["command"]
    assert summary["top1"] > 0.3


def remarks(finished):
    """TensorFlow's lines in stderr, beside the bar and what we say ourselves."""
    lines = re.split(r"[\r\n]+", finished.stderr)
    return [line for line in lines if re.match(r"[IWEF]\d{4} |WARNING", line)]


def test_tensorflow_makes_no_remarks(journey):
    for finished in (journey.prepare, journey.evaluate, journey.export, journey.predict):
        assert remarks(finished) == []


@pytest.mark.long
def test_tensorflow_makes_no_remarks_when_it_is_imported(journey):
    """In a new Python, in which nothing but the command silences it."""
    arguments = ["-m", "imagenet_fast", "evaluate", f"--model_dir={journey.folder}/run", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    del environment["TF_CPP_MIN_LOG_LEVEL"]  # which tests/conftest.py sets
    finished = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    assert remarks(finished) == []
    found, expected = (json.loads(own.stdout) for own in (finished, journey.evaluate))
    assert (found["examples"], found["top1"]) == (expected["examples"], expected["top1"])


def test_evaluate(journey):
    result = json.loads(journey.evaluate.stdout)
    summary = json.loads((journey.folder / "run" / "summary.json").read_text())
    assert (result["examples"], result["skipped"]) == (359, 0)
    for name in ("top1", "top5", "loss"):
        assert result[name] == pytest.approx(summary[name], rel=1e-6)
    assert result["checkpoint"] == f"{journey.folder}/run/checkpoints/ckpt-88"


def test_predictions_are_as_accurate_as_evaluation(journey):
    assert journey.export.stdout == f"{journey.folder}/model\n"
    answers = [json.loads(line) for line in journey.predict.stdout.splitlines()]
    assert [answer["file"] for answer in answers] == journey.images
    ranks = [
        [entry["class"] for entry in answer["predictions"]].index(label)
        if label in [entry["class"] for entry in answer["predictions"]]
        else 5
        for answer, label in zip(answers, journey.labels)
    ]
    result = json.loads(journey.evaluate.stdout)
    assert len(ranks) == 359
    assert sum(rank == 0 for rank in ranks) / 359 == pytest.approx(result["top1"])
    assert sum(rank < 5 for rank in ranks) / 359 == pytest.approx(result["top5"])


# --- Mistakes


def assert_one_error(stdout, stderr, message):
    assert stdout == ""
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith(f"imagenet-fast train: error: {message}")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--data_dir=/nowhere", "data_dir /nowhere does not exist"),
        ("--saved_model=/", "/ already exists; remove it, or leave out --saved_model"),
    ],
)
def test_mistakes(digits, tmp_path, capfd, argument, message):
    given = [*TRAIN, f"--data_dir={digits}", f"--model_dir={tmp_path}/run", argument]
    assert commands.run(given) == 2
    assert_one_error(*capfd.readouterr(), message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (
            ["--strategy=auto", "--logical_cpus=3"],
            {},
            "batch_size 32 (global) cannot be split evenly over 3 replicas with "
            "accumulation_steps=1; try 30 or 33",
        ),
        ([], {"TF_CONFIG": '{"cluster": '}, "TF_CONFIG is not JSON ("),
    ],
    ids=["devices", "cluster"],
)
def test_mistakes_in_what_is_read_once(command, digits, tmp_path, arguments, environment, message):
    """In new processes, because TensorFlow's devices are configured once."""
    given = [*TRAIN, f"--data_dir={digits}", f"--model_dir={tmp_path}/run", *arguments]
    finished = command(*given, status=2, environment=environment)
    assert_one_error(finished.stdout, finished.stderr, message)
    assert not (tmp_path / "run").exists()


# --- prepare, in this process


def run(capfd, *arguments):
    status = commands.run(["prepare", *map(str, arguments)])
    out, err = capfd.readouterr()
    return types.SimpleNamespace(status=status, out=out, err=err)


def test_verify(digits, tmp_path, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    finished = run(capfd, "--verify", f"--data_dir={copy}")
    assert finished.status == 0
    assert finished.out.startswith(f"{copy} is whole: digits, 10 classes, 1,438 train images")

    damaged, lost = sorted(copy.glob("train-*"))[:2]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    lost.unlink()
    finished = run(capfd, "--verify", f"--data_dir={copy}")
    assert (finished.status, finished.out) == (2, "")
    assert damaged.name in finished.err
    assert lost.name in finished.err
    assert re.fullmatch(r".*/copy is damaged; problems: \d+", finished.err.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --source: what kind of data to prepare"),
        (["--source=digit"], "no source 'digit'; choose from .* did you mean 'digits'"),
        (
            ["--source=digits", "--source_path=x"],
            "the source 'digits' has no source_path or other options",
        ),
        (["--source=tfds"], "the source 'tfds' needs source_path"),
        (["--source=digits", "--pad_to=32"], "the source 'digits' has no pad_to or other options"),
        (
            ["--source=digits", "--encoding=jpg"],
            "encoding='jpg' does not exist; did you mean 'jpeg'",
        ),
        (["--source=digits", "--exif=aply"], "exif='aply' does not exist; did you mean 'apply'"),
        (["--source=folders", "--source_path=/nowhere"], "/nowhere: no such directory"),
        (["--verify"], "/data"),
    ],
    ids=" ".join,
)
def test_mistakes_in_prepare(tmp_path, capfd, arguments, message):
    finished = run(capfd, f"--data_dir={tmp_path}/data", *arguments)
    assert (finished.status, finished.out) == (2, "")
    assert finished.err.count("\n") == 1
    assert re.match(f"imagenet-fast prepare: error: .*{message}", finished.err)
    assert not (tmp_path / "data").exists()


def test_pixels_with_a_border_as_pngs(tmp_path, capfd):
    source, data = tmp_path / "idx", tmp_path / "data"
    source.mkdir()
    pixels = np.random.RandomState(0).randint(0, 256, (10, 28, 28), np.uint8)
    labels = np.array([9, 0, 0, 3, 0, 2, 7, 2, 5, 5], np.uint8)  # with which Fashion-MNIST begins
    for prefix in ("train", "t10k"):
        for name, array in (("images", pixels), ("labels", labels)):
            header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
            path = source / f"{prefix}-{name}-idx{array.ndim}-ubyte"
            path.write_bytes(header + array.tobytes())
    arguments = ("--source=idx", f"--source_path={source}", f"--data_dir={data}")
    finished = run(capfd, *arguments, "--pad_to=32", "--encoding=png")
    assert finished.status == 0, finished.err
    assert finished.out.splitlines()[0] == "converted 20 images: pixels"
    example = decode_example(next(iter(read_records(data / "train-00000-of-00008"))))
    image = np.asarray(Image.open(io.BytesIO(example[ENCODED][0])))
    place = int(example[FILENAME][0].decode().removeprefix("train_"))
    np.testing.assert_array_equal(image, np.pad(pixels[place], 2))
    assert "encoding 'png' there, 'jpeg' requested" in run(capfd, *arguments, "--pad_to=32").err
    message = run(capfd, *arguments, "--encoding=png").err
    assert "is finished" in message and "prepare the current images in another directory" in message
    for side in ("--max_side=14", "--shorter_side=14"):
        finished = run(capfd, *arguments[:2], f"--data_dir={tmp_path}/{side}", side)
        assert finished.out.splitlines()[0] == "converted 20 images: pixels, resized"


@pytest.mark.parametrize("holdout", ["1", "-0.5"])
def test_a_holdout_that_cannot_be(digits, tmp_path, capfd, holdout):
    pathlib.Path(tmp_path, "images", "cat").mkdir(parents=True)
    record = next(iter(read_records(next(pathlib.Path(digits).glob("train-*")))))
    image = decode_example(record)[ENCODED][0]
    pathlib.Path(tmp_path, "images", "cat", "1.jpg").write_bytes(image)
    arguments = ("--source=folders", f"--source_path={tmp_path}/images", f"--holdout={holdout}")
    finished = run(capfd, f"--data_dir={tmp_path}/data", *arguments)
    assert finished.status == 2
    assert "the fraction to hold out must be in [0, 1)" in finished.err


def test_classes_without_validation_images_are_warned_of(tmp_path, capfd):
    for first, name, images in ((0, "cat", 10), (100, "dog", 2)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(images):
            image = Image.new("L", (16, 16), first + 10 * number)
            image.save(tmp_path / "images" / name / f"{number}.jpg")
    arguments = ("--source=folders", f"--source_path={tmp_path}/images", f"--data_dir={tmp_path}/d")
    finished = run(capfd, *arguments)
    assert finished.status == 0
    assert finished.err.startswith(
        "warning: there are no validation images to measure the accuracy of 1 class "
    )
    assert finished.err.count("warning: ") == 1
    assert finished.out.endswith("2 classes, 11 train images, 1 validation image\n")


def folders(directory, *classes):
    """Real photographs are not needed: one grey image of each class."""
    for name in classes:
        (directory / name).mkdir(parents=True)
        PIL.Image.new("L", (8, 8)).save(directory / name / "grey.png")


def test_data_inside_of_its_source_would_be_a_class(tmp_path, capfd):
    folders(tmp_path / "photos", "cat", "dog")
    source = ("--source=folders", f"--source_path={tmp_path}/photos")
    finished = run(capfd, *source, f"--data_dir={tmp_path}/photos/shards")
    assert finished.status == 2
    assert "photos/shards is inside source_path" in finished.err
    assert not (tmp_path / "photos" / "shards").exists()


def test_a_single_class_is_warned_of(tmp_path, capfd):
    folders(tmp_path / "photos", "cat")
    source = ("--source=folders", f"--source_path={tmp_path}/photos")
    finished = run(capfd, *source, f"--data_dir={tmp_path}/shards")
    assert finished.status == 0
    assert "warning: all images have the same class" in finished.err


def test_a_run_and_its_export_are_two_directories(capfd, tmp_path):
    directory = f"{tmp_path}/run"
    assert commands.run(["train", f"--model_dir={directory}", f"--saved_model={directory}"]) == 2
    assert "saved_model must be another directory than model_dir" in capfd.readouterr().err


def test_folders_without_a_path(tmp_path, capfd, monkeypatch):
    """The working directory is not meant."""
    monkeypatch.chdir(tmp_path)
    finished = run(capfd, "--source=folders", f"--data_dir={tmp_path}/shards")
    assert finished.status == 2
    assert finished.err.endswith("error: the source 'folders' needs source_path\n")
