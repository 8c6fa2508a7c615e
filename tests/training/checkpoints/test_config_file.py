"""What a run that others made may decide: nothing that runs, connects or writes elsewhere."""

import dataclasses
import json
import os

import pytest

from imagenet_fast import Config, UserError, commands, read_config
from imagenet_fast.base.notices import warn_once
from imagenet_fast.training.checkpoints.config_file import (
    as_begun,
    config_of_run,
    differences,
    stored_config,
)

# Values of the options that a run's file may not give.
FOREIGN = {
    "cache_dir": "/somewhere/else",
    "compile_cache": "/somewhere/else",
    "input_servers": ("192.0.2.1:5050",),
    "pipeline_servers": ("192.0.2.1:5060",),
    "tpu": "grpc://192.0.2.1:8470",
}


@pytest.fixture
def run(tmp_path):
    """Returns a function that writes a run's configuration and returns the directory."""
    warn_once.cache_clear()

    def write(**options):
        config = Config().replace(**options)
        (tmp_path / "config.json").write_text(config.to_json())
        return str(tmp_path)

    return write


def test_ordinary_options_are_read(run):
    directory = run(batch_size=64, seed=3, data_dir="data/digits", initial_weights="runs/other")
    expected = Config(
        batch_size=64,
        seed=3,
        data_dir="data/digits",
        initial_weights="runs/other",
        model_dir=directory,
    )
    assert read_config(directory) == stored_config(directory) == expected


def test_every_option_that_names_a_server_or_a_folder_is_left_out(run):
    """Options with an address or a folder in their name or help: a new one belongs into a list."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    left_out = {name for name in fields if not fields[name].metadata["in_files_of_runs"]}
    assert left_out == {*FOREIGN, "pretrained"}  # which may download
    named = {name for name in fields if name.endswith(("_dir", "_servers", "tpu", "_weights"))}
    # Handled on their own: where the run is, and three that are read only.
    assert named - left_out == {"model_dir", "data_dir", "initial_weights", "class_weights"}


def test_frozen_layers_of_pretrained_weights_are_read_without_them(run):
    """Evaluation and export asked for the weights that the checkpoint replaces."""
    directory = run(model="keras:VGG16", pretrained=True, freeze_through="all_but_head")
    expected = Config(model="keras:VGG16", model_dir=directory)
    assert read_config(directory) == config_of_run(directory, {}) == expected
    directory = run(model="keras:VGG16", initial_weights="x", freeze_through="1")
    assert read_config(directory).freeze_through == "1"


def test_options_without_a_value_have_a_name():
    config = Config()
    assert differences(["teacher"], config.replace(teacher="runs/a"), config) == (
        "teacher is runs/a there, empty here"
    )


@pytest.mark.parametrize("name", FOREIGN)
def test_servers_and_places_to_write_are_not_taken_from_a_run(run, name):
    directory = run(pipeline_stages=2, xla=name == "compile_cache", **{name: FOREIGN[name]})
    assert getattr(stored_config(directory), name) == FOREIGN[name]
    assert getattr(read_config(directory), name) == getattr(Config, name)
    assert getattr(config_of_run(directory, {}), name) == getattr(Config, name)
    given = config_of_run(directory, {name: FOREIGN[name]})
    assert getattr(given, name) == FOREIGN[name]


def test_servers_are_named_once_more(run, capsys):
    directory = run(pipeline_stages=2, pipeline_servers=FOREIGN["pipeline_servers"])
    config_of_run(directory, {})
    found = capsys.readouterr().err
    assert "pipeline_servers=192.0.2.1:5060 of the run" in found
    assert "give --pipeline_servers to connect to it" in found
    config_of_run(directory, {"pipeline_servers": ("localhost:1",)})
    assert not capsys.readouterr().err


def test_a_bucket_is_read_only_if_the_command_line_names_it(run, tmp_path, capsys):
    directory = run(data_dir="gs://theirs/data")
    assert read_config(directory).data_dir == ""
    assert config_of_run(directory, {}).data_dir == ""
    assert "data_dir=gs://theirs/data of the run" in capsys.readouterr().err
    given = config_of_run(directory, {"data_dir": "gs://theirs/data"})
    assert given.data_dir == "gs://theirs/data"


def test_the_bucket_of_the_run_is_named(run, monkeypatch):
    from imagenet_fast.training.checkpoints import config_file

    text = Config(data_dir="gs://mine/data").to_json()
    monkeypatch.setattr(config_file, "read_bounded", lambda *_: text.encode())
    assert read_config("gs://mine/runs/1").data_dir == "gs://mine/data"
    assert read_config("gs://yours/runs/1").data_dir == ""


def test_code_is_run_only_if_the_command_line_names_it(run):
    directory = run(model="downloads.run.evil:build")
    assert read_config(directory).model == "custom"
    with pytest.raises(UserError, match=r"if you trust it, give --model=downloads\.run"):
        config_of_run(directory, {})
    named = config_of_run(directory, {"model": "downloads.run.evil:build"})
    assert named.model == "downloads.run.evil:build"


EVIL = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
def build(num_classes, image_shape): ...
"""
# The command, in the folder of the first argument, from which Python imports, too.
IN_A_FOLDER = """
import os, sys
from imagenet_fast.__main__ import main
os.chdir(sys.argv.pop(1))
main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "--model_dir=downloads/run"],
        pytest.param(
            ["export", "--model_dir=downloads/run", "--saved_model=exported"],
            marks=pytest.mark.long,
        ),
        pytest.param(["benchmark", "serving", "--model_dir=downloads/run"], marks=pytest.mark.long),
        [
            *("train", "--flagfile=digits", "--synthetic", "--num_classes=10", "--data_dir="),
            *("--model_dir=new", "--initial_weights=downloads/run"),
        ],
    ],
)
def test_commands_do_not_import_what_a_run_names(run_python, tmp_path, command):
    folder = tmp_path / "downloads" / "run"
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text(EVIL)
    config = Config(model="downloads.run.evil:build", data_dir=str(tmp_path / "data"))
    (folder / "config.json").write_text(config.to_json())
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in range(10)))
    done = run_python(["-c", IN_A_FOLDER, tmp_path, *command], check=False)
    assert done.returncode == 2, done.stderr
    assert "is code, downloads.run.evil:build" in done.stderr
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 10**6, "nested too deeply"),
        (b"[]", "Expected `object`, got `array`"),
        (
            b'{"batch_size": ' + b"9" * 400 + b"}",
            "batch_size is a whole number of more than 64 bits",
        ),
        (
            b'{"learning_rate": ' + b"9" * 400 + b"}",
            "learning_rate is a whole number of more than 64 bits",
        ),
        (b'{"data_dir": "a\\u0000b"}', "must be text without control characters"),
        (b'{"batch_size": {"a": []}}', "must be a whole number"),
        (b'{"size_ramp": "' + b"1," * 10 + b'x"}', "must be"),
        (b'{"image_size": 60000}', "image_size is 60000, but must be in .1, 8192."),
        (b'{"data_threads": 100000}', "data_threads is 100000, but must be in .0, 1024."),
        (b'{"model": "amoebanet_d", "normal_cells": 99999}', "must be a multiple of 3 in .3, 150."),
        (json.dumps({"decay_at": ["1 step"] * 2000}).encode(), "decay_at has 2,000 values"),
        (json.dumps({"decay_at": "1 step," * 2000}).encode(), "decay_at has 2,000 values"),
        (json.dumps({"model": "__import__('os').system('true')"}).encode(), "does not exist"),
    ],
)
def test_damaged_and_hostile_configurations(tmp_path, content, reason):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read_config(str(tmp_path))


def test_a_configuration_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="not a regular file"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("evaluate", []),
        ("export", ["--saved_model=exported"]),
        ("benchmark serving", []),
    ],
)
def test_commands_take_the_model_that_they_ask_for(run, command, others, capsys):
    directory = run(model="my_module:build", data_dir="nowhere")
    name, *rest = command.split()
    arguments = [name, *rest, f"--model_dir={directory}", *others]
    assert commands.run(arguments) == 2
    assert "give --model=my_module:build" in capsys.readouterr().err
    assert commands.run([*arguments, "--model=my_module:build"]) == 2  # it has no checkpoint
    assert "--model" not in capsys.readouterr().err


# --- The replicas of a run


def write_run(folder, **options):
    """A run's configuration; without replicas as of an earlier version."""
    values = json.loads(Config(batch_size=64, **options).to_json())
    if not values["replicas"]:
        del values["replicas"]
    (folder / "config.json").write_text(json.dumps(values))
    return Config(batch_size=64, model_dir=str(folder))


def test_a_run_keeps_its_replicas(tmp_path):
    config = write_run(tmp_path, replicas=(8, 2), strategy="multi_worker")
    assert as_begun(config).replicas == (8, 2)
    assert as_begun(config.replace(replicas=(8,))).replicas == (8, 2)
    # Refused later, as another batch size.
    assert as_begun(config.replace(replicas=(4, 1))).replicas == (4, 1)


@pytest.mark.parametrize(("replicas", "steps", "of"), [(7, 1, 64), (128, 1, 64), (64, 2, 32)])
def test_replicas_that_cannot_share_a_batch(replicas, steps, of):
    with pytest.raises(UserError, match=f"use a divisor of {of} as --replicas"):
        Config(batch_size=64, accumulation_steps=steps, replicas=(replicas,))


@pytest.mark.parametrize(("name", "value"), [("batch_size", 60), ("accumulation_steps", 16)])
def test_another_batch_is_refused_by_its_name(tmp_path, name, value):
    """Not as a batch that the run's replicas, which nobody gave here, cannot share."""
    config = write_run(tmp_path, replicas=(8, 1)).replace(**{name: value})
    with pytest.raises(
        UserError, match=f"other options .{name} is .* there, {value} here"
    ) as error:
        as_begun(config)
    assert "replicas" not in str(error.value)


def test_micro_batches_of_which_the_batch_is_made_may_be_others(tmp_path):
    """The network, which is not known here, may need the same."""
    config = write_run(tmp_path, replicas=(8, 1)).replace(accumulation_steps=4)
    assert as_begun(config).replicas == (8, 1)


def test_a_new_run_has_the_replicas_of_its_devices(tmp_path):
    config = Config(batch_size=64, model_dir=str(tmp_path))
    assert as_begun(config) == config


@pytest.mark.parametrize("changes", [{"strategy": "mirrored"}, {"logical_cpus": 2}])
def test_an_earlier_versions_run_goes_on_where_it_began(tmp_path, changes):
    config = write_run(tmp_path)
    assert as_begun(config).replicas == ()
    with pytest.raises(UserError, match=r"did not record the number of replicas.*--replicas=N"):
        as_begun(config.replace(**changes))
    assert as_begun(config.replace(replicas=(2,), **changes)).replicas == (2,)
