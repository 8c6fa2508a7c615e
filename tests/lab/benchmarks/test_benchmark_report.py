import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest

from imagenet_fast.base import environment
from imagenet_fast.base.errors import UserError
from imagenet_fast.lab.benchmarks.report import make_report
from imagenet_fast.lab.benchmarks.timing import Comparison, Spread, Times

COMPARISON = Comparison(
    "resnet50, training step: batch 16",
    ("The same network.",),
    ("imagenet_fast", "Keras applications"),
    (
        Times((1.6, 2.0, 3.2), (3.0, 3.0, 3.0)),
        Times((2.0, 2.0, 8.0), (2.0, 4.0, 4.0)),
    ),
    images=16,
)
MANY = Comparison(
    "an update",
    (),
    ("one", "two", "three"),
    (
        Times((1.0, 2.0, 1.0), (1.0, 1.0, 1.0)),
        Times((2.0, 2.0, 2.0), (1.0, 1.0, 1.0)),
        Times((0.5, 0.5, 0.5), (2.0, 2.0, 2.0)),
    ),
)


@pytest.fixture
def hardware(monkeypatch):
    """A machine without a GPU."""
    values = {"cpu": "Some CPU", "cpu_features": ["avx2"], "cores": 2, "gpus": []}
    monkeypatch.setattr(environment, "hardware", lambda: values)
    return values


def test_table(hardware):
    lines = make_report(COMPARISON).text.splitlines()
    assert lines[:2] == ["resnet50, training step: batch 16", "The same network."]
    rows = {line[:18].strip(): line[18:].split() for line in lines[4:6]}
    assert rows["imagenet_fast"] == ["2000.0", "1600.0", "3200.0", "8.00", "5.00", "10.00"]
    assert rows["Keras applications"] == ["2000.0", "2000.0", "8000.0", "8.00", "2.00", "8.00"]
    assert lines[-5:] == [
        "imagenet_fast to    ratio of times          ratio of CPU times",
        "Keras applications  0.800 (0.400 to 1.000)  0.750 (0.750 to 1.500)",
        "",
        "medians of 3 repeats; below 1, imagenet_fast is faster",
        "on Some CPU, 2 cores",
    ]


def test_table_of_many_ways_without_images(hardware):
    lines = make_report(MANY).text.splitlines()
    assert lines[2].split() == ["ms:", "median", "min", "max"]
    assert lines[3:10] == [
        "one        1000.0  1000.0  2000.0",
        "two        2000.0  2000.0  2000.0",
        "three       500.0   500.0   500.0",
        "",
        "one to  ratio of times          ratio of CPU times",
        "two     0.500 (0.500 to 1.000)  1.000 (1.000 to 1.000)",
        "three   2.000 (2.000 to 4.000)  0.500 (0.500 to 0.500)",
    ]


def test_fractions(hardware, tmp_path):
    fractions = {"waiting": Spread(0.125, -0.01, 0.2), "talking": Spread(0.5, 0.4, 0.6)}
    comparison = dataclasses.replace(COMPARISON, fractions=fractions)
    assert make_report(comparison).text.splitlines()[-6:-2] == [
        "fractions of imagenet_fast's time",
        "waiting: 12.5 (-1.0 to 20.0) %",
        "talking: 50.0 (40.0 to 60.0) %",
        "",
    ]
    values = json.loads(make_report(comparison).json({}))
    assert values["shares"]["waiting"] == {"median": 0.125, "min": -0.01, "max": 0.2}
    assert "shares" not in json.loads(make_report(COMPARISON).json({}))


def test_the_table_names_the_gpu_where_there_is_one(hardware):
    hardware["gpus"] = ["NVIDIA H100"]
    assert make_report(COMPARISON).text.endswith("\non NVIDIA H100")


def test_files(tmp_path, hardware):
    directory = tmp_path / "new" / "folder"
    paths = make_report(COMPARISON).write({"batch_size": 16}, str(directory), "resnet50_float32")
    assert paths == [
        str(directory / f"resnet50_float32{suffix}") for suffix in (".txt", ".json", ".svg")
    ]
    values = json.loads((directory / "resnet50_float32.json").read_text())
    assert values["ratio_of"] == "imagenet_fast"
    assert values["ratio_to"] == {"Keras applications": {"median": 0.8, "min": 0.4, "max": 1.0}}
    assert values["cpu_ratio_to"] == {
        "Keras applications": {"median": 0.75, "min": 0.75, "max": 1.5}
    }
    assert values["n"] == 3
    assert values["results"]["Keras applications"]["each_seconds"] == [2.0, 2.0, 8.0]
    assert values["results"]["Keras applications"]["each_cpu_seconds"] == [2.0, 4.0, 4.0]
    assert values["results"]["imagenet_fast"]["images_per_second"]["median"] == 8.0
    assert values["options"] == {"batch_size": 16}
    assert values["hardware"] == hardware
    assert values["versions"].keys() >= {"python", "tensorflow", "keras"}
    assert values["command"]
    picture = ElementTree.parse(directory / "resnet50_float32.svg").getroot()
    assert picture.tag.endswith("svg")
    assert sorted(path.name for path in directory.iterdir()) == [
        "resnet50_float32.json",
        "resnet50_float32.svg",
        "resnet50_float32.txt",
    ]
    assert "Keras applications" in (directory / "resnet50_float32.txt").read_text()


def test_files_of_many_ways(tmp_path, hardware):
    make_report(MANY).write({}, str(tmp_path), "many")
    values = json.loads((tmp_path / "many.json").read_text())
    assert values["ratio_to"]["three"]["median"] == 2.0
    assert values["ratio_to"].keys() == {"two", "three"}
    assert values["results"]["three"]["seconds"]["median"] == 0.5
    assert not any("images_per_second" in result for result in values["results"].values())
    # Text is drawn as paths, with the text itself in a comment.
    picture = (tmp_path / "many.svg").read_text()
    for label in (
        "one: median 1,000.0 ms",
        "two: median 2,000.0 ms; one to it: 0.500 (0.500 to 1.000)",
        "three: median 500.0 ms; one to it: 2.000 (2.000 to 4.000)",
    ):
        assert f"<!-- {label} -->" in picture


def test_the_same_numbers_give_the_same_picture(tmp_path):
    for name in "ab":
        make_report(COMPARISON).write({}, str(tmp_path), name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_an_impossible_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file/below: Not a directory"):
        make_report(COMPARISON).write({}, str(tmp_path / "file" / "below"), "name")
