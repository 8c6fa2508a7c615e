"""Options of earlier versions: in Python, in flags, and in the configuration of a run."""

import json
import re

import pytest

from imagenet_fast.base import former_names
from imagenet_fast.base.errors import UserError
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config, option_names
from imagenet_fast.training.checkpoints.model_dir import check_model_dir

INSTEAD = "sharpen the pencil"
REALLY_GONE = former_names._REMOVED


@pytest.fixture(autouse=True)
def removed(monkeypatch):
    """Two options that were never there stand for those that are gone."""
    names = {
        "pencil": former_names._Removed(INSTEAD, same=("hard",)),
        "eraser": former_names._Removed("use a pencil"),
    }
    monkeypatch.setattr(former_names, "_REMOVED", names)


def stored(model_dir, **removed):
    """Writes a run of a version that had the removed options."""
    config = Config(model_dir=str(model_dir))
    values = {**json.loads(config.to_json()), **removed}
    (model_dir / "config.json").write_text(json.dumps(values))
    (model_dir / "labels.txt").write_text("a\nb\n")
    return config


def test_a_value_with_which_nothing_changes_is_ignored(tmp_path, capsys):
    config = stored(tmp_path, pencil="hard", eraser=True)
    check_model_dir(config, ["a", "b"])
    assert capsys.readouterr().err == ""


def test_a_run_with_another_value_loads_but_does_not_resume(tmp_path, capsys):
    config = stored(tmp_path, pencil="soft")
    text = (tmp_path / "config.json").read_text()
    assert Config.from_json(text) == config
    assert capsys.readouterr().err == f'this run\'s pencil="soft" is gone: {INSTEAD}\n'
    with pytest.raises(UserError, match=f'not resumed: pencil="soft" is gone: {INSTEAD}; choose'):
        check_model_dir(config, ["a", "b"])


def test_given_again_one_line_says_what_to_do(tmp_path):
    message = re.escape(f"'pencil' is gone: {INSTEAD}")
    file = tmp_path / "old.flags"
    file.write_text("--pencil=hard\n")
    for give in (
        lambda: Config(pencil="hard"),
        lambda: Config().replace(pencil="hard"),
        lambda: Config.from_flagfile(file),
        lambda: Config.from_flagfile("digits", pencil="hard"),
    ):
        with pytest.raises(UserError, match=message):
            give()
    file.write_text("--noeraser\n")
    with pytest.raises(UserError, match="'noeraser' is gone: use a pencil"):
        Config.from_flagfile(file)
    for flag in ("--pencil=hard", "--nopencil"):
        with pytest.raises(UserError, match=f"pencil is gone: {INSTEAD}"):
            CommandFlags("train", option_names()).parse([flag])


def test_what_is_gone_is_no_option():
    assert not REALLY_GONE.keys() & {*option_names()}
