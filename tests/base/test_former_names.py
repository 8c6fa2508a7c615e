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
REPLACED = [name for former in former_names._REPLACED for name in former.defaults]


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
    assert not {*REALLY_GONE, *REPLACED} & {*option_names()}


# --- Options that others replace

RAW = {"pixel_mean": (0, 0, 0), "pixel_std": (1, 1, 1)}
AIRBENCH = {"model": "airbench94"}
LARS = {"optimizer": "lars"}


def written(config, **former):
    """Returns the ``config.json`` of a version that had all the options that are replaced."""
    defaults = {k: v for own in former_names._REPLACED for k, v in own.defaults.items()}
    return json.dumps({**json.loads(config.to_json()), **defaults, **former})


@pytest.mark.parametrize(
    ("config", "former", "today", "notice"),
    [
        (LARS, {"lars_epsilon": 1e-5}, {"optimizer_epsilon": 1e-5}, "optimizer_epsilon=1e-05"),
        (AIRBENCH, {"group_activation": "silu"}, {"activation": "silu"}, "activation=silu"),
        (
            {},
            {"rand_augment_layers": 2, "rand_augment_magnitude": 9.0},
            {"rand_augment": (2.0, 9.0)},
            "rand_augment=2,9.0",
        ),
        ({}, {"rand_augment_layers": 3}, {"rand_augment": (3.0, 10.0)}, "rand_augment=3,10.0"),
        ({}, {"normalize_pixels": False}, RAW, "pixel_mean=0,0,0 pixel_std=1,1,1"),
        ({}, {"on_damaged_checkpoint": "stop"}, {}, ""),
    ],
)
def test_a_run_resumes_with_what_replaces_its_options(
    tmp_path, capsys, config, former, today, notice
):
    config = Config(model_dir=str(tmp_path), **config)
    (tmp_path / "config.json").write_text(written(config, **former))
    (tmp_path / "labels.txt").write_text("a\nb\n")
    config = config.replace(**today)
    assert Config.from_json((tmp_path / "config.json").read_text()) == config
    check_model_dir(config, ["a", "b"])
    (line,) = capsys.readouterr().err.splitlines()
    first = next(iter(former))
    assert line.startswith(f"this run's {first}={str(former[first]).lower()}")
    assert line.endswith(f" is now {notice}" if notice else " has no effect any more")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"optimizer": "rmsprop", "optimizer_epsilon": 1.0},
        {**LARS, "model": "resnet9", "activation": "celu"},
        AIRBENCH,
    ],
)
def test_a_run_that_did_not_give_them_is_as_before(capsys, config):
    config = Config(**config)
    assert Config.from_json(written(config)) == config
    # Activations were those of one network, whatever the model.
    if config.activation == "auto":
        assert Config.from_json(written(config, activation="relu")) == config
    assert capsys.readouterr().err == ""


def test_fills_with_the_mean_keep_a_run_of_raw_pixels_from_resuming(tmp_path):
    """The mean was another than the one subtracted."""
    config = Config(model_dir=str(tmp_path), random_erasing=0.5)
    (tmp_path / "config.json").write_text(written(config, normalize_pixels=False))
    assert Config.from_json((tmp_path / "config.json").read_text()) == config.replace(**RAW)
    with pytest.raises(UserError, match="not resumed: normalize_pixels=false is gone: pixel_mean"):
        check_model_dir(config.replace(**RAW), ["a", "b"])


@pytest.mark.parametrize(
    ("flags", "today"),
    [
        ("--optimizer=lars --lars_epsilon=1e-5", {**LARS, "optimizer_epsilon": 1e-5}),
        ("--lars_epsilon=0.5 --optimizer=lars", {**LARS, "optimizer_epsilon": 0.5}),
        ("--optimizer=rmsprop --lars_epsilon=0", {"optimizer": "rmsprop"}),
        ("--model=airbench94 --group_activation=gelu", AIRBENCH),
        ("--rand_augment_magnitude=9 --rand_augment_layers=2", {"rand_augment": (2, 9)}),
        ("--rand_augment_layers=2 --seed=1", {"rand_augment": (2, 10), "seed": 1}),
        ("--rand_augment_layers=0 --rand_augment_magnitude=9", {}),
        ("--nonormalize_pixels", RAW),
        ("--normalize_pixels=false --normalize_pixels", {}),
        ("--on_damaged_checkpoint=previous", {}),
    ],
)
def test_former_flags_mean_the_same(tmp_path, capsys, flags, today):
    file = tmp_path / "old.flags"
    file.write_text("# A recipe of an earlier version.\n" + flags.replace(" ", "\n"))
    assert Config.from_flagfile(file) == Config(**today)
    (line,) = capsys.readouterr().err.splitlines()
    assert " is now --" in line or line.endswith(" has no effect any more")
    command = CommandFlags("train", option_names())
    command.parse(flags.split())
    assert Config(**command.changes()) == Config(**today)
    assert capsys.readouterr().err == ""  # said already


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rand_augment_magnitude=9", "rand_augment_magnitude' is gone: give both as rand_augm"),
        ("--nonormalize_pixels\n--cutout=8", "normalize_pixels' is gone: pixel_mean=0,0,0 and"),
        ("--lars_epsilon", "lars_epsilon' is gone: it is optimizer_epsilon"),
    ],
)
def test_former_flags_without_an_equal(tmp_path, flags, message):
    file = tmp_path / "old.flags"
    file.write_text(flags)
    with pytest.raises(UserError, match=message):
        Config.from_flagfile(file)


def test_errors_of_a_flagfile_have_its_lines(tmp_path):
    file = tmp_path / "old.flags"
    file.write_text("--nonormalize_pixels\n\n--seed=x\n--lars_epsilon=high\n")
    with pytest.raises(UserError, match="line 3: seed is 'x'"):
        Config.from_flagfile(file)
    file.write_text("--nonormalize_pixels\n\n--lars_epsilon=high\n")
    with pytest.raises(UserError, match="line 3: optimizer_epsilon is 'high', but must be a numb"):
        Config.from_flagfile(file)
