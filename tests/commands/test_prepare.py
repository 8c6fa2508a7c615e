"""The flags of ``prepare``: those of sources are the sources' own."""

import inspect
import pathlib
import re

import pytest

from imagenet_fast import commands
from imagenet_fast.base.errors import UserError
from imagenet_fast.commands import prepare
from imagenet_fast.data.prepare.sources import KINDS

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# Given by another flag, or by none.
FOR_ALL = {"path", "name", "seed"}


def parameters(kind):
    """Returns the options of a source that are flags of some sources only, and their defaults."""
    own = inspect.signature(KINDS[kind]).parameters.values()
    return {each.name: each.default for each in own if each.name not in FOR_ALL}


@pytest.mark.parametrize("kind", KINDS)
def test_each_option_of_a_source_is_a_flag(kind):
    for name, default in parameters(kind).items():
        of_flag, text = prepare._SOURCE_OPTIONS[name]
        assert of_flag == ("" if default is None else default)
        assert kind in text.partition(":")[0].split(", ")


def test_each_flag_of_a_source_names_those_that_have_it():
    for name, (_, text) in prepare._SOURCE_OPTIONS.items():
        kinds = text.partition(":")[0].split(", ")
        assert {*kinds} == {kind for kind in KINDS if name in parameters(kind)}, name


def test_the_help_names_all_sources(capsys):
    with pytest.raises(SystemExit):
        prepare.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())  # without line breaks
    listed = text.partition("--source: ")[2].partition(": see")[0]
    assert {*listed.replace(" or ", ", ").split(", ")} == {*KINDS}


def test_the_pages_have_all_sources():
    rows = re.findall(r"^\| (`.+?) \|", (DOCS / "data.md").read_text(), re.MULTILINE)
    in_table = {kind for row in rows for kind in re.findall(r"`(\w+)`", row)}
    assert {*KINDS} <= in_table
    api = (DOCS / "api" / "data.rst").read_text()
    assert [kind for kind in KINDS if f".open_{kind}\n" not in api] == []


def test_a_source_gets_what_is_given_as_the_flag_s_default(monkeypatch, tmp_path, capsys):
    def open_other(path, holdout=0.3, pad_to=8, image_column="first", allow_outside=True):
        raise UserError(f"got {holdout} {pad_to} {image_column} {allow_outside}")

    monkeypatch.setitem(KINDS, "other", open_other)
    given = ("--source=other", f"--source_path={tmp_path}", f"--data_dir={tmp_path}/out")
    for flags, got in (
        ((), "0.3 8 first True"),
        (("--holdout=0.1", "--pad_to=0", "--noallow_outside"), "0.1 0 first False"),
        (("--image_column=",), "0.3 8 first True"),
    ):
        assert commands.run(["prepare", *given, *flags]) == 2
        assert f"got {got}\n" in capsys.readouterr().err
