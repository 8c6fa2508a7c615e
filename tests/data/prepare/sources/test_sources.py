import importlib
import pkgutil

import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.prepare import sources
from imagenet_fast.data.prepare.sources import KINDS, open_source
from imagenet_fast.data.prepare.sources.arrays import ArraySource


def test_kinds_are_the_sources_of_all_modules():
    modules = (
        importlib.import_module(f"{sources.__name__}.{found.name}")
        for found in pkgutil.iter_modules(sources.__path__)
    )
    functions = {
        name.removeprefix("open_"): value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("open_") and value.__annotations__["return"].endswith("Source")
    }
    assert functions == KINDS


def test_unknown_kind_suggests_the_nearest():
    with pytest.raises(UserError, match=r"no source 'cifar'; choose from .*did you mean 'cifar10'"):
        open_source("cifar")


def test_an_option_of_another_kind_is_refused(tmp_path):
    with pytest.raises(
        UserError, match="'idx' has no holdout: it has only source_path, name, pad_to"
    ):
        open_source("idx", tmp_path, holdout=0.5)
    with pytest.raises(UserError, match="'digits' has no source_path or other options"):
        open_source("digits", tmp_path)


def test_none_means_the_default(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        open_source("idx", tmp_path / "nowhere", holdout=None)


def source(labels, **others):
    images = np.zeros([1, 8, 8], np.uint8)
    return ArraySource("idx", "animals", labels, {"train": (images, np.array([0]))}, **others)


def test_spaces_around_class_names_are_removed():
    """A run's labels.txt has a name on each line."""
    assert source(["cat\n", " dog", "grey wolf"]).labels == ("cat", "dog", "grey wolf")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (["cat", " "], "animals: class 1 is named '', which is empty: rename it"),
        (["a\nb"], r"class 0 is named 'a\\nb', which is not one line of text in UTF-8"),
        (["a\u2028b"], "which is not one line of text"),
        (["a\rb"], "which is not one line of text"),
        (["a\0b"], "which is not one line of text"),
        (["\ud83d"], "which is not one line of text in UTF-8"),
        (["cat", "dog", "cat "], "classes 0 and 2 have the same name, 'cat', without the spaces"),
    ],
)
def test_class_names_that_no_source_may_have(labels, reason):
    with pytest.raises(UserError, match=reason):
        source(labels)


@pytest.mark.parametrize("kind", ["folders", "imagenet", "tfds"])
def test_path_is_required(kind):
    with pytest.raises(UserError, match=f"'{kind}' needs source_path"):
        open_source(kind)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"digits"}))
def test_no_such_path(kind, tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        open_source(kind, tmp_path / "nowhere")
