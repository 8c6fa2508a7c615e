import sys

import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare.sources import open_source


def test_all_digits_once_a_fifth_held_out():
    pytest.importorskip("sklearn")
    source = open_source("digits")
    assert source.labels == tuple("0123456789")
    assert sum(source.splits.values()) == 1797
    assert abs(source.splits["validation"] - 1797 / 5) < 5
    counts = np.bincount(
        [source.read("validation", i).label for i in range(source.splits["validation"])]
    )
    assert counts.min() >= 34 and counts.max() <= 37
    assert open_source("digits").describe() == source.describe()


def test_images_are_the_digits_enlarged():
    datasets = pytest.importorskip("sklearn.datasets")
    source = open_source("digits")
    originals = datasets.load_digits()
    item = source.read("train", 0)
    assert item.image.shape == (32, 32) and item.image.dtype == np.uint8
    small = item.image.reshape(8, 4, 8, 4).mean((1, 3))
    distances = np.abs(originals.images * 255 / 16 - small).mean((1, 2))
    assert originals.target[distances.argmin()] == item.label
    assert distances.min() < 16  # bicubic; those to other images are above 40


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[digits\]'` in a clone"):
        open_source("digits")
