"""``imagenet-fast recipes``."""

import re
import shlex

from imagenet_fast import commands
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import option_names
from imagenet_fast.optimizers.batch_tables import options_for_batch
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


def test_flags_for_a_batch_size_between_recipes(capsys):
    assert commands.run(["recipes", "--batch_table=mlperf", "--batch_size=24576"]) == 0
    given = shlex.split(capsys.readouterr().out)
    flags = CommandFlags("train", option_names())
    flags.parse(given)
    assert flags.changes() == options_for_batch("mlperf", 24576)
    assert commands.run(["recipes", "--batch_table=mlperf"]) == 2
    assert "values for batches from 4096 to 65536, not for 0" in capsys.readouterr().err
