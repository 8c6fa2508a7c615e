"""Names, subsets and several labels of other test sets."""

import json

import numpy as np
import pytest

from imagenet_fast import UserError
from imagenet_fast.training.test_sets import (
    competing_classes,
    read_right_labels,
    right_labels_accuracy,
    right_labels_of,
)

TRAINED = ("tench", "crane", "hen", "crane", "cock", "7")


def written(path, content):
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("map.json", {"n04": "cock", "n01": "tench", "n02": 3, "n03": "hen", "n09": "none"}),
        ("map.csv", "class,model\nn04,cock\r\nn01,tench\n\nn02,3\nn03,hen\n"),
        ("MAP.CSV", "\ufeffn04,cock\nn01,tench\nn02,3\nn03,hen\n"),
    ],
)
def test_class_map(tmp_path, name, content):
    path = written(tmp_path / name, content)
    found = competing_classes(path, ("n04", "n01", "n02"), TRAINED)
    assert found.classes == (0, 3, 4)
    assert found.numbers == (2, 0, 1)


def test_several_classes_of_a_set_are_one_of_the_model(tmp_path):
    path = written(tmp_path / "map.json", {"a": "hen", "b": "tench", "c": "hen"})
    assert competing_classes(path, ("a", "b", "c"), TRAINED) == ((0, 2), (1, 0, 1))


def test_the_same_names_or_numbers():
    assert competing_classes("same", ("hen", "tench"), TRAINED) == ((0, 2), (1, 0))
    # As folders of numbers are sorted; a name goes before a number.
    assert competing_classes("same", ("0", "10", "2"), ("a",) * 11) == ((0, 2, 10), (0, 2, 1))
    assert competing_classes("same", ("7",), TRAINED) == ((5,), (0,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": "hen"}, "does not say which class of the model is 'b', 'c', 'd' and 1 more"),
        (dict.fromkeys("abcde", "hne"), "the model has no class 'hne', 'hne', 'hne' and 2 more"),
        (dict.fromkeys("abcde", "6"), "the model has no class '6'"),
        (dict.fromkeys("abcde", "9" * 5000), "the model has no class '9999"),
        (dict.fromkeys("abcde", "crane"), "several classes named 'crane'.*give a number from 0"),
        ("[1]", "neither a JSON object"),
        ("{", "neither a JSON object"),
        ({"a": [1]}, "neither a JSON object"),
    ],
)
def test_wrong_class_maps(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        competing_classes(written(tmp_path / "map.json", content), tuple("abcde"), TRAINED)


@pytest.mark.parametrize(
    ("content", "message"),
    [("a,b,c\n", "row 1 has 3 cells"), ("a,hen\na,cock\n", "several rows are of 'a'")],
)
def test_wrong_csv(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        competing_classes(written(tmp_path / "map.csv", content), ("a",), TRAINED)


def test_a_map_that_is_not_there():
    with pytest.raises(UserError, match=r"nowhere cannot be read: .* or same if"):
        competing_classes("nowhere", ("a",), TRAINED)


FILES = ("val/x/ILSVRC2012_val_00000002.JPEG", "ILSVRC2012_val_00000003.JPEG", "a_1.JPEG")


@pytest.mark.parametrize(
    "content",
    [
        [[0], [], [2, 1]],
        {"val/x/ILSVRC2012_val_00000002.JPEG": [0], FILES[1]: [], "y/a_1.JPEG": [2, 1], "z": [1]},
    ],
)
def test_right_labels(tmp_path, content):
    """A list is in the order of file names."""
    path = written(tmp_path / "real.json", content)
    found = right_labels_of(path, read_right_labels(path, 3), FILES)
    assert found == [[0], [], [2, 1]]
    assert right_labels_accuracy(np.array([0, 1, 1]), found) == (1.0, 2)
    assert right_labels_accuracy(np.array([1, 1, 2]), found) == (0.5, 2)
    assert right_labels_accuracy(np.array([1]), [[]]) == (0.0, 0)


def test_as_the_code_of_real(tmp_path):
    """Of Beyer et al.: images without labels count as right or wrong nowhere."""
    generator = np.random.default_rng(0)
    real = [generator.choice(9, generator.integers(0, 4), False).tolist() for _ in range(500)]
    names = [f"ILSVRC2012_val_{index + 1:08d}.JPEG" for index in range(500)]
    order, predicted = generator.permutation(500), generator.integers(0, 9, 500)
    is_correct = [predicted[i] in real[i] for i in range(500) if real[i]]
    path = written(tmp_path / "real.json", real)
    lists = right_labels_of(path, read_right_labels(path, 9), [names[index] for index in order])
    found = right_labels_accuracy(predicted[order], lists)
    assert found[0] == pytest.approx(np.mean(is_correct), abs=1e-12)
    assert found[1] == len(is_correct) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[0], [3], [1]], "has the label 3, but the model's are 0 to 2"),
        ([[0], [-1], [1]], "has the label -1"),
        ([0, 1, 2], "no JSON list of lists of class numbers"),
        ([[], [], []], "has no right label of any image"),
        ({**{file: [] for file in FILES}, "other.JPEG": [1]}, "has no right label of any image"),
        ([[0], [1]], "has 2 lists, but there are 3 images"),
        ({"a_1.JPEG": [0]}, "has no list for 'ILSVRC2012_val_00000002.JPEG', 'ILSVRC2012_val_0"),
    ],
)
def test_wrong_right_labels(tmp_path, content, message):
    path = written(tmp_path / "real.json", content)
    with pytest.raises(UserError, match=message):
        right_labels_of(path, read_right_labels(path, 3), FILES)


def test_right_labels_of_images_of_the_same_name():
    """As those of class folders often are; another split may have them, too."""
    lists = {"a/1.png": [0], "b/1.png": [1, 2], "c/2.png": [2]}
    assert right_labels_of("real.json", lists, ["b/1.png", "a/1.png"]) == [[1, 2], [0]]
    assert right_labels_of("real.json", lists, ["elsewhere/c/2.png"]) == [[2]]
    for found, files in [
        ([[0], [1]], ["a/1.png", "b/1.png"]),
        ({}, ["a/1.png", "b/1.png"]),
        (lists, ["elsewhere/a/1.png"]),  # was given the last one's
    ]:
        with pytest.raises(UserError, match=r"'1\.png' is the name of several images"):
            right_labels_of("real.json", found, files)
