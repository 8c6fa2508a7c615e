"""Recipes by name."""

import pathlib

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.recipes import find_recipe, recipe_headers, recipe_names


@pytest.mark.parametrize("given", ["digits", "digits.flags", "flags/digits.flags"])
def test_a_recipe_from_any_folder(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    assert Config.from_flagfile(given).model == "resnet8"


def test_own_files_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # a data set's folder is no flagfile
    assert Config.from_flagfile("digits").batch_size == 32
    (tmp_path / "digits.flags").write_text("--batch_size=16\n")
    assert Config.from_flagfile("digits.flags").batch_size == 16
    (tmp_path / "mine.flags").write_text("--flagfile=digits\n--seed=3\n")
    assert Config.from_flagfile("mine.flags") == Config.from_flagfile("digits", seed=3)


def test_a_file_with_the_name_of_a_recipe_is_used_with_a_notice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flags").mkdir()
    assert Config.from_flagfile("flags/digits.flags").batch_size == 32  # an empty folder
    assert "is used" not in capsys.readouterr().err
    (tmp_path / "flags" / "digits.flags").write_text("--batch_size=16\n")
    assert Config.from_flagfile("flags/digits.flags").batch_size == 16
    assert "flags/digits.flags is used, not the recipe digits" in capsys.readouterr().err
    assert Config.from_flagfile("digits").batch_size == 32
    # A recipe that includes another does not find the user's.
    (tmp_path / "mlperf_4k.flags").write_text("--momentum=0.5\n")
    assert Config.from_flagfile("mlperf_64k").momentum == 0.951807
    assert Config.from_flagfile("mlperf_64k").optimizer == "lars"


def test_an_installation_without_recipes(tmp_path, monkeypatch):
    monkeypatch.setattr("imagenet_fast.recipes._FOLDER", tmp_path)
    with pytest.raises(UserError, match=f"there are no recipes in {tmp_path}: reinstall"):
        recipe_names()


def test_the_folder_of_the_checkout_has_the_recipes():
    folder = pathlib.Path(__file__).parents[1] / "flags"
    assert sorted(path.stem for path in folder.glob("*.flags")) == recipe_names()
    assert Config.from_flagfile(folder / "digits.flags") == Config.from_flagfile("digits")


def test_other_folders_have_no_recipes():
    assert find_recipe("runs/digits.flags") is None
    assert find_recipe("/flags/digits.flags") is None
    assert find_recipe("digit") is None


def test_each_recipe_has_a_header():
    assert [recipe.name for recipe in recipe_headers()] == recipe_names()
    for recipe in recipe_headers():
        assert all(recipe), recipe.name
        assert not any("--flagfile" in text for text in recipe), recipe.name
    (digits,) = (recipe for recipe in recipe_headers() if recipe.name == "digits")
    assert digits.about.startswith("A ResNet-8 on scikit-learn's")
    assert digits[2:4] == ("any CPU.", "at least 97% top-1; no publication.")
