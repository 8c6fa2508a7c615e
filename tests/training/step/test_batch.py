"""Batches of Keras' data."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.training.step.batch import renumbered, unpacked

IMAGES = np.zeros((4, 2, 2, 3), "uint8")
LABELS = [2, 0, 1, 1]


@pytest.mark.parametrize("form", [lambda x: x, lambda x: np.reshape(x, (4, 1))])
@pytest.mark.parametrize("weights", [(), (np.array([1, 0, 0.5, 1]),)])
def test_labels_and_weights_of_any_form(form, weights):
    data = (IMAGES, form(np.array(LABELS, "int64")), *map(form, weights))
    _, labels, found = unpacked(data, multi_label=False)
    assert (labels.dtype, found.dtype) == (tf.int32, tf.float32)
    assert labels.numpy().tolist() == LABELS
    assert found.numpy().tolist() == (weights[0].tolist() if weights else [1] * 4)


def test_several_labels_an_image():
    several = np.eye(4, 3)
    assert unpacked((IMAGES, several), multi_label=True)[1].numpy().tolist() == several.tolist()
    with pytest.raises(UserError, match=r"labels are class numbers \[batch\], but got \(4, 3\)"):
        unpacked((IMAGES, several), multi_label=False)


def test_weights_of_pixels_are_refused():
    with pytest.raises(UserError, match=r"weights are \[batch\], but got \(4, 2\): one for each"):
        unpacked((IMAGES, LABELS, np.ones((4, 2))), multi_label=False)


def test_labels_of_other_data_get_the_models_numbers():
    """Also several an image; padding stays negative."""
    numbers = (3, 0)  # of the data's classes in the model
    one = renumbered(tf.constant([0, 1, -1]), numbers, 4)
    assert one.numpy().tolist() == [3, 0, -1]
    several = renumbered(tf.constant([[1, 1], [0, 1], [0, 0], [-1, -1]]), numbers, 4)
    expected = [[1, 0, 0, 1], [1, 0, 0, 0], [0] * 4, [-1] * 4]
    assert several.numpy().tolist() == expected
