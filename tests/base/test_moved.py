import importlib

import pytest

from imagenet_fast.base.moved import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_imports_name_the_new_place(old, new):
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"imagenet_fast.{old}")
    assert str(caught.value) == (
        f"imagenet_fast.{old} is imagenet_fast.{new} now: import it from there"
    )
    assert importlib.util.find_spec(f"imagenet_fast.{new}")


def test_names_of_a_folder_that_moved():
    with pytest.raises(ModuleNotFoundError, match=r"fast\.planning is imagenet_fast\.lab\."):
        from imagenet_fast.planning.run import plan  # noqa: F401


def test_from_a_package():
    with pytest.raises(ImportError, match=r"fast\.planning is imagenet_fast\.lab\.planning now"):
        from imagenet_fast import planning  # noqa: F401
    with pytest.raises(ImportError, match=r"training\.checkpoint is .*\.checkpoints\.checkpoint n"):
        from imagenet_fast.training import checkpoint  # noqa: F401
    with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'imagenet_fast'"):
        from imagenet_fast import nothing  # noqa: F401


def test_other_modules_are_missing_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'imagenet_fast\.nothing'"):
        importlib.import_module("imagenet_fast.nothing")
