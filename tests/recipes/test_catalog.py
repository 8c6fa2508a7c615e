"""Recipes by name."""

import pytest

from imagenet_fast.config import Config
from imagenet_fast.recipes.catalog import find_recipe, recipe_names, recipes


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


def test_other_folders_have_no_recipes():
    assert find_recipe("runs/digits.flags") is None
    assert find_recipe("/flags/digits.flags") is None
    assert find_recipe("digit") is None


def test_each_recipe_has_a_header():
    assert [recipe.name for recipe in recipes()] == recipe_names()
    for recipe in recipes():
        assert all(recipe), recipe.name
        assert not any("--flagfile" in text for text in recipe), recipe.name
    (digits,) = (recipe for recipe in recipes() if recipe.name == "digits")
    assert digits.about.startswith("A ResNet-8 on scikit-learn's")
    assert digits[2:4] == ("any CPU.", "at least 97% top-1; no publication.")
