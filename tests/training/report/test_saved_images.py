"""What a run's directory keeps of its pictures, and what TensorBoard then shows."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from confusion_entries import entries

from imagenet_fast.training.logs.tensorboard import TensorBoard
from imagenet_fast.training.report.input_images import InputImages
from imagenet_fast.training.report.saved_images import (
    load_error_analysis,
    load_inputs,
    remove_error_analysis,
    save_error_analysis,
    save_inputs,
)
from imagenet_fast.training.step.calibration import reliability
from imagenet_fast.training.step.error_analysis import ErrorAnalysis

LABELS = ["cat", "dog|hound"]


@pytest.fixture
def inputs():
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    labels = np.array([0, 1, 1], np.int32)
    return InputImages(images, labels, labels[::-1].copy(), np.array([1, 0.5, 1], np.float32))


@pytest.fixture
def analysis(inputs):
    return ErrorAnalysis(
        step=25,
        confusion=entries([[7, 2], [0, 9]]),
        images=inputs.images[:2],
        labels=np.array([0, 0], np.int32),
        answers=np.array([1, 1], np.int32),
        label_probabilities=np.array([0.1, 0.2], np.float32),
        answer_probabilities=np.array([0.9, 0.8], np.float32),
        losses=np.array([2.3, 1.6], np.float32),
        calibration=reliability(np.linspace(0.5, 1, 18), np.arange(18) % 9 > 0),
        files=np.array(["cats/1.jpg", "=2+3.png"]),
        confused_files=np.array([["cats/1.jpg", "=2+3.png", ""]]),
    )


def assert_equal(found, expected):
    assert type(found) is type(expected)
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value)
        assert type(getattr(found, name)) is type(value)


def shown(model_dir, kind):
    """What TensorBoard reads: (step, name) -> a picture's size, or a text."""
    found = {}
    for path in (model_dir / "tensorboard" / kind).glob("*tfevents*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                content = tf.make_ndarray(value.tensor).tolist()
                if value.metadata.plugin_data.plugin_name == "images":
                    width, height, *images = content
                    (picture,) = (tf.io.decode_png(image).numpy() for image in images)
                    assert picture.shape == (int(height), int(width), 3)
                    assert picture.std() > 10
                    content = picture.shape
                found[event.step, value.tag] = content
    return found


def test_nothing_is_saved_at_first(tmp_path):
    assert load_inputs(str(tmp_path), 3) is load_error_analysis(str(tmp_path), 3) is None
    remove_error_analysis(str(tmp_path))


@pytest.fixture
def board(tmp_path):
    with contextlib.closing(TensorBoard(str(tmp_path))) as board:
        yield board


def test_input_images(tmp_path, inputs, board):
    save_inputs(str(tmp_path), inputs, LABELS, 4, board)
    assert_equal(load_inputs(str(tmp_path), 3), inputs)
    assert list(shown(tmp_path, "train")) == [(4, "images/input_images")]


def test_examination(tmp_path, analysis, board):
    save_error_analysis(str(tmp_path), analysis, LABELS, board)
    assert_equal(load_error_analysis(str(tmp_path), 3), analysis)
    found = shown(tmp_path, "validation")
    assert set(found) == {
        (25, "images/confusion_matrix"),
        (25, "images/worst_mistakes"),
        (25, "most_confused"),
    }
    lines = found[25, "most_confused"].decode().splitlines()
    assert lines[2:] == ["| cat | dog\\|hound | 2 of 9 |"]
    remove_error_analysis(str(tmp_path))
    assert load_error_analysis(str(tmp_path), 3) is None


def test_pictures_do_not_hide_later_rows(tmp_path, inputs, board):
    """TensorBoard may leave a file for ever when it finds a newer one beside it."""
    save_inputs(str(tmp_path), inputs, LABELS, 0, board)
    board.write({"kind": "train", "step": 1, "loss": 0.5})
    assert len(list((tmp_path / "tensorboard" / "train").iterdir())) == 1


def test_no_mistakes_and_no_readable_inputs(tmp_path, inputs, analysis, board):
    nothing = {name: value[:0] for name, value in vars(inputs).items()}
    save_inputs(str(tmp_path), InputImages(**nothing), LABELS, 0, board)
    assert len(load_inputs(str(tmp_path), 3).images) == 0
    perfect = {name: value[:0] for name, value in vars(analysis).items() if name != "step"}
    perfect = ErrorAnalysis(step=3, **{**perfect, "confusion": entries(np.diag([9, 9]))})
    save_error_analysis(str(tmp_path), perfect, LABELS, board)
    assert set(shown(tmp_path, "validation")) == {
        (3, "images/confusion_matrix"),
        (3, "most_confused"),
    }


def test_without_tensorboard_nothing_is_shown(tmp_path, inputs, analysis):
    save_inputs(str(tmp_path), inputs, LABELS, 0, None)
    save_error_analysis(str(tmp_path), analysis, LABELS, None)
    assert {path.name for path in tmp_path.iterdir()} == {"input_images.npz", "examination.npz"}


def test_a_kill_while_showing_saves_nothing(tmp_path, analysis, board, monkeypatch):
    """So that the next process shows it again."""

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(tf.summary, "image", killed)
    with pytest.raises(KeyboardInterrupt):
        save_error_analysis(str(tmp_path), analysis, LABELS, board)
    assert load_error_analysis(str(tmp_path), 3) is None


def test_more_images_than_a_run_saves(tmp_path, inputs):
    """A page of two million images of one pixel never ends."""
    many = {name: np.repeat(array[:1], 101, 0) for name, array in vars(inputs).items()}
    save_inputs(str(tmp_path), type(inputs)(**many), LABELS, 3, None)
    assert load_inputs(str(tmp_path), 3) is None
    fewer = {name: array[:100] for name, array in many.items()}
    save_inputs(str(tmp_path), type(inputs)(**fewer), LABELS, 3, None)
    assert len(load_inputs(str(tmp_path), 3).images) == 100


@pytest.mark.parametrize("damage", [lambda data: data[:300], lambda data: b"", lambda data: b"PK"])
def test_damaged_files_are_ignored(tmp_path, inputs, damage):
    """It can be made again."""
    save_inputs(str(tmp_path), inputs, LABELS, 3, None)
    path = tmp_path / "input_images.npz"
    path.write_bytes(damage(path.read_bytes()))
    assert load_inputs(str(tmp_path), 3) is None


def test_values_that_no_run_saves(tmp_path, inputs, analysis):
    """Pages and charts would fail, or never end."""
    of_floats = {"labels": np.array([0.5] * len(inputs.images), np.float32)}
    empty = {"images": inputs.images[:, :0]}
    wide = {"images": np.zeros([len(inputs.images), 1, 8193, 3], np.uint8)}
    for changes in (of_floats, empty, wide):
        save_inputs(str(tmp_path), type(inputs)(**{**vars(inputs), **changes}), LABELS, 3, None)
        assert load_inputs(str(tmp_path), 3) is None
    for changes in (
        {"confusion": np.repeat(analysis.confusion[:1], 10, 0)},
        {"calibration": analysis.calibration * np.nan},
        {"calibration": analysis.calibration[:4]},
        {"files": np.array(["a"] * 3)},
        {"files": np.array(["a" * 1001] * 2)},
        {"confused_files": np.array([["a"] * 4])},
    ):
        changed = type(analysis)(**{**vars(analysis), **changes})
        save_error_analysis(str(tmp_path), changed, LABELS, None)
        assert load_error_analysis(str(tmp_path), 3) is None


def test_an_analysis_of_an_earlier_version(tmp_path, analysis):
    later = {"calibration", "files", "confused_files"}
    earlier = {name: value for name, value in vars(analysis).items() if name not in later}
    np.savez_compressed(tmp_path / "examination.npz", **earlier)
    found = load_error_analysis(str(tmp_path), 3)
    np.testing.assert_array_equal(found.confusion, analysis.confusion)
    assert len(found.calibration) == len(found.files) == len(found.confused_files) == 0
