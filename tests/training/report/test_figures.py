"""Pictures, looked at pixel by pixel, and what is written below them."""

import dataclasses
import html
import io
import re
import warnings

import numpy as np
import pytest
from confusion_entries import entries
from PIL import Image

from imagenet_fast.training.report import figures
from imagenet_fast.training.report.figures import (
    confusion_png,
    confusion_svg,
    images_png,
    input_captions,
    mistake_captions,
    most_confused,
)
from imagenet_fast.training.report.input_images import InputImages
from imagenet_fast.training.step.error_analysis import ErrorAnalysis

BLUE, ORANGE = np.array(figures._RIGHT) * 255, np.array(figures._WRONG) * 255


def analysis(confusion, labels=(), answers=()):
    return ErrorAnalysis(
        step=1,
        confusion=entries(confusion),
        images=np.zeros((len(labels), 2, 2, 3), np.uint8),
        labels=np.array(labels, np.int32),
        answers=np.array(answers, np.int32),
        label_probabilities=np.full(len(labels), 0.014, np.float32),
        answer_probabilities=np.full(len(labels), 0.95, np.float32),
        losses=np.ones(len(labels), np.float32),
    )


def names(count):
    return [f"class {number}" for number in range(count)]


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def count_near(picture, color, distance=12):
    return (np.abs(picture - color).max(axis=-1) < distance).sum()


def test_most_confused():
    confusion = [[90, 0, 10], [3, 0, 7], [0, 0, 50]]
    assert most_confused(analysis(confusion), "abc") == [
        ("a", "c", 10, 100, ()),
        ("b", "c", 7, 10, ()),
        ("b", "a", 3, 10, ()),
    ]
    files = np.array([["1.png", "2.png"], ["3.png", ""], ["", ""]])
    named = dataclasses.replace(analysis(confusion), confused_files=files)
    found = [pair.files for pair in most_confused(named, "abc")]
    assert found == [("1.png", "2.png"), ("3.png",), ()]
    assert most_confused(analysis(np.diag([1, 2, 3])), "abc") == []
    many = np.random.default_rng(0).integers(1, 9, (100, 100))
    pairs = most_confused(analysis(many), names(100))
    assert len(pairs) == 15
    assert pairs[0].images == 8


def test_captions():
    assert mistake_captions(analysis(np.eye(3), [0, 2], [1, 0]), "abc") == [
        ("a (1%)", "b (95%)"),
        ("c (1%)", "a (95%)"),
    ]
    shares = np.array([1, 0.7], np.float32)
    inputs = InputImages(np.zeros((2, 4, 4, 3), "u1"), np.array([2, 0]), np.array([0, 1]), shares)
    assert input_captions(inputs, "abc") == [("c",), ("70% a", "30% b")]


def test_right_predictions_are_blue_and_wrong_ones_orange():
    right = pixels(confusion_png(analysis(np.diag([5, 5])), "ab"))
    assert count_near(right, BLUE) > 20_000
    assert count_near(right, ORANGE) == 0
    wrong = pixels(confusion_png(analysis([[0, 5], [5, 0]]), "ab"))
    assert count_near(wrong, ORANGE) > 20_000
    assert count_near(wrong, BLUE) == 0
    # Of as many images, but each row is to be read for itself.
    uneven = pixels(confusion_png(analysis(np.diag([500, 1])), "ab"))
    assert count_near(uneven, BLUE) == pytest.approx(count_near(right, BLUE), rel=0.02)


def test_a_class_without_images():
    picture = pixels(confusion_png(analysis([[0, 0], [0, 3]]), "ab"))
    assert count_near(picture, BLUE) > 10_000


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_few_classes_have_names_and_numbers():
    confusion = np.diag([1234] * 10)
    confusion[2, 3] = 5
    found = texts(confusion_svg(analysis(confusion), names(10)))
    assert found.count("class 3") == 2
    assert found.count("1,234") == 10
    assert found.count("5") == 1
    assert "0" not in found


def test_more_classes_have_names_and_many_have_none():
    found = texts(confusion_svg(analysis(np.diag([77] * 40)), names(40)))
    assert found.count("class 39") == 2
    assert "77" not in found
    found = texts(confusion_svg(analysis(np.diag([77] * 1000)), names(1000)))
    assert not any(text.startswith("class") for text in found)
    assert {"0", "200", "800", "true class", "prediction"} <= set(found)


def test_a_thousand_classes_can_be_seen():
    """A single class of which all are taken for another: a hundredth of the side."""
    confusion = np.diag([50] * 1000)
    confusion[500:510] = np.roll(confusion[500:510], 300, axis=1)
    picture = pixels(confusion_png(analysis(confusion), names(1000)))
    assert count_near(picture, ORANGE) >= 16
    page = confusion_svg(analysis(confusion), names(1000))
    assert len(page) < 60_000


def test_more_classes_than_a_matrix_could_have():
    """Of a million its numbers alone would take 8 TB."""
    confusion = np.array([[0, 999_999, 3], [999_999, 999_999, 5]])
    found = dataclasses.replace(analysis([[0]]), confusion=confusion)
    labels = names(1_000_000)
    assert most_confused(found, labels) == [(labels[0], labels[-1], 3, 3, ())]
    assert count_near(pixels(confusion_png(found, labels)), BLUE) >= 16


@pytest.mark.parametrize("classes", [3, 100, 101, 1000, 1234])
def test_pooling_loses_no_image(classes):
    confusion = np.random.default_rng(classes).integers(0, 5, (classes, classes))
    pooled = figures._pool(entries(confusion), classes)
    assert pooled.shape == {3: (3, 3), 101: (51, 51), 1234: (95, 95)}.get(classes, (100, 100))
    assert pooled.sum() == confusion.sum()
    if classes <= 100:
        np.testing.assert_array_equal(pooled, confusion)


def test_images_stand_in_rows_in_their_colors():
    colors = np.array([[250, 10, 10], [10, 250, 10], [10, 10, 250]])
    images = np.repeat(colors, 3, axis=0).astype(np.uint8)[:, None, None] * np.ones((6, 6, 1), "u1")
    picture = pixels(images_png(images, [f"image {n}\nof nine" for n in range(9)]))
    height, width = picture.shape[:2]
    # Eight in the first row, and one more.
    firsts = [picture[height // 5, int((column + 0.5) * width / 8)] for column in range(8)]
    np.testing.assert_array_equal(firsts, np.repeat(colors, 3, axis=0)[:8])
    np.testing.assert_array_equal(picture[height * 7 // 10, width // 16], colors[2])
    assert (picture[height * 7 // 10, width // 2] == 255).all()


def test_same_pictures_each_time():
    found = analysis(np.diag([5, 6]), [0], [1])
    assert confusion_png(found, "ab") == confusion_png(found, "ab")
    assert confusion_svg(found, "ab") == confusion_svg(found, "ab")
    assert images_png(found.images, ["a"]) == images_png(found.images, ["a"])
    assert images_png(found.images, ["a"]) != images_png(found.images, ["b"])


def test_names_that_are_too_long_are_cut():
    long = "a name that is far too long for a column"
    found = texts(confusion_svg(analysis(np.eye(2, dtype=int)), [long, "b"]))
    assert "a name that is fa\u2026" in found


def test_names_are_no_formulas():
    labels = ["$5_to_$10", r"$\no$", "100% $"]
    found = analysis(np.eye(3, dtype=int), [0], [1])
    assert all(texts(confusion_svg(found, labels)).count(label) == 2 for label in labels)
    assert confusion_png(found, labels)
    assert images_png(found.images, ["\n".join(labels)])


def test_characters_that_the_font_lacks_are_not_warned_of():
    labels = ["\N{CJK UNIFIED IDEOGRAPH-732B}", "\N{GRINNING FACE}"]
    found = analysis(np.eye(2, dtype=int))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert labels[0] in html.unescape(confusion_svg(found, labels))
        confusion_png(found, labels)
