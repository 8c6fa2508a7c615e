"""``imagenet-fast recipes``."""

import re

from imagenet_fast import commands
from imagenet_fast.recipes import find_recipe, recipe_names


def test_the_list(capsys):
    assert commands.run(["recipes"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^\w+$", text, re.MULTILINE) == recipe_names()
    assert max(map(len, text.splitlines())) <= 96
    # Sentences do not end at "et al."
    assert (
        '    Ying et al. 2018, "Image Classification at Supercomputer Scale": ResNet-50 at' in text
    )
    assert (
        "    Expected: 94.01% top-1 in 2.6 s on one A100 (the publication, mean of 200 runs).\n"
        in text
    )


def test_one(capsys):
    assert commands.run(["recipes", "digits"]) == 0
    assert capsys.readouterr().out.rstrip() == find_recipe("digits").read_text().rstrip()


def test_an_unknown_one(capsys):
    assert commands.run(["recipes", "digit"]) == 2
    assert "there is no recipe 'digit'; did you mean 'digits'" in capsys.readouterr().err
