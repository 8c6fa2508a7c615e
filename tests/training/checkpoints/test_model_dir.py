"""Whose model_dir it is, and what stands in it."""

import contextlib
import json
import os
import pathlib
import re
import shutil

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.distribute.cluster import TAKING_PART
from imagenet_fast.training.checkpoints import model_dir
from imagenet_fast.training.checkpoints.config_file import read_config
from imagenet_fast.training.checkpoints.model_dir import (
    alone_in,
    check_labels,
    check_model_dir,
    check_network,
    checkpoint_of,
    claim_model_dir,
    classes_in_run,
    latest_checkpoint,
    read_labels,
)

LABEL_NAMES = ("cat", "dog", "grey wolf")


@pytest.fixture
def config(tmp_path):
    return Config(model_dir=str(tmp_path / "run"))


def test_a_new_directory_is_claimed(config):
    claim_model_dir(config, LABEL_NAMES)
    files = {path.name for path in pathlib.Path(config.model_dir).iterdir()}
    assert files == {"checkpoints", "config.json", "labels.txt"}
    assert read_config(config.model_dir) == config
    assert read_labels(config.model_dir) == LABEL_NAMES
    claim_model_dir(config, LABEL_NAMES)  # the same run goes on


def test_checking_a_directory_writes_nothing(config):
    check_model_dir(config, LABEL_NAMES)
    assert not pathlib.Path(config.model_dir).exists()
    claim_model_dir(config, LABEL_NAMES)
    check_model_dir(config, LABEL_NAMES)
    with pytest.raises(UserError, match=r"other options \(seed is 0 there, 3 here"):
        check_model_dir(config.replace(seed=3), LABEL_NAMES)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("cat", "horse", "dog"), "has 'horse' as class 1, which is 'dog' of the run in "),
        (("cat", "dog"), "/other has 2 classes, but the run in "),
        (("0", "1"), "/other has 2 classes, but the run in "),
    ],
)
def test_data_of_other_classes(config, labels, message):
    trained = ("cat", "dog", "horse")
    claim_model_dir(config, trained)
    other = config.replace(data_dir="/other")
    for use in (claim_model_dir, check_model_dir, check_labels):
        with pytest.raises(UserError, match=message):
            use(other, labels)
    assert read_labels(config.model_dir) == trained
    assert read_config(config.model_dir) == config


@pytest.mark.parametrize(
    ("trained", "labels"), [(("cat", "dog"), ("0", "1")), (("0", "1"), ("cat", "dog"))]
)
def test_numbered_classes_are_only_counted(config, trained, labels):
    claim_model_dir(config, trained)
    check_labels(config, labels)


def test_classes_whose_names_are_numbers_are_not_taken_for_nameless(config):
    claim_model_dir(config, ("0", "1", "2"))
    with pytest.raises(UserError, match="has '3' as class 2, which is '2' of the run in "):
        check_labels(config, ("0", "1", "3"))


@pytest.mark.parametrize(
    ("trained", "labels", "numbers"),
    [
        (("cat", "dog", "horse"), ("cat", "dog", "horse"), (0, 1, 2)),
        (("cat", "dog", "horse"), ("horse", "cat"), (2, 0)),
        (("0", "180", "270", "90"), ("0", "270", "90"), (0, 2, 3)),
        (("cat", "dog"), ("0", "1"), (0, 1)),
        (("0", "1"), ("cat", "dog"), (0, 1)),
        (("crane", "owl", "crane"), ("crane", "owl", "crane"), (0, 1, 2)),
        (("crane", "owl", "crane"), ("owl",), (1,)),
    ],
)
def test_classes_are_found_by_name(config, trained, labels, numbers):
    claim_model_dir(config, trained)
    assert classes_in_run(config, labels) == numbers


@pytest.mark.parametrize(
    ("trained", "labels", "unknown"),
    [
        (("cat", "dog"), ("cat", "cow"), "does not: 'cow'. Those of the run are in "),
        (("0", "1", "2"), ("0", "1", "3"), "does not: '3'. "),
        (("a", "b"), tuple("cdefg"), "does not: 'c', 'd', 'e' and 2 more. "),
        (("crane", "owl", "crane"), ("crane", "owl"), "has several classes named 'crane'"),
        (("crane", "owl"), ("crane", "crane"), "has several classes named 'crane'"),
    ],
)
def test_classes_that_a_run_does_not_have(config, trained, labels, unknown):
    claim_model_dir(config, trained)
    with pytest.raises(UserError, match=unknown):
        classes_in_run(config, labels)


@pytest.mark.parametrize("may_be_mapped", [True, False])
def test_a_class_map_is_advised_where_there_is_one(config, may_be_mapped):
    claim_model_dir(config, ("cat", "dog"))
    with pytest.raises(UserError) as caught:
        classes_in_run(config, ("cow",), may_be_mapped=may_be_mapped)
    assert ("--class_map" in str(caught.value)) == may_be_mapped


def test_free_options_may_change(config, tmp_path):
    claim_model_dir(config, LABEL_NAMES)
    changed = config.replace(log_every="3 steps", keep_checkpoints=7, data_dir="/elsewhere")
    claim_model_dir(changed, LABEL_NAMES)
    assert read_config(config.model_dir) == changed


def test_a_run_with_other_options(config):
    claim_model_dir(config, LABEL_NAMES)
    changed = config.replace(seed=3, duration="8 epochs", keep_checkpoints=7)
    with pytest.raises(UserError) as caught:
        claim_model_dir(changed, LABEL_NAMES)
    assert (
        "holds a run with other options (seed is 0 there, 3 here; "
        "duration is 90 epochs there, 8 epochs here); "
        "give its options, as by its --flagfile, to resume it, or choose another --model_dir"
    ) in str(caught.value)
    assert read_config(config.model_dir) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 64}, "image_size is 224 there, 64 here"),
        ({"antialias": True}, "antialias is false there, true here"),
        ({"pixel_mean": (0.0, 0.0, 0.0)}, "pixel_mean is 123.675,116.28,103.53 there, 0,0,0 here"),
        ({"model": "resnet8"}, "model is resnet50 there, resnet8 here"),
        ({"stride_on_1x1": True, "ema_decay": 0.9}, "stride_on_1x1 is false there, true here; ema"),
    ],
)
def test_weights_fit_only_the_run_s_network(config, changes, message):
    claim_model_dir(config, LABEL_NAMES)
    advice = "leave these options out, or in Python "
    advice += re.escape(f"start from imagenet_fast.read_config('{config.model_dir}')")
    with pytest.raises(UserError, match=f"has other options .{message}.*{advice}"):
        check_network(config.replace(**changes))
    check_network(
        config.replace(
            eval_image_size=256,
            eval_crop_fraction=1.0,
            precision="mixed_bfloat16",
            learning_rate=3.0,
            batch_norm_batch_size=32,
            initial_weights="a",
            seed=3,
        )
    )


def test_a_network_given_in_python_must_be_given_again(config):
    claim_model_dir(config.replace(model="custom"), LABEL_NAMES)
    for check in (check_network, lambda config: check_model_dir(config, LABEL_NAMES)):
        with pytest.raises(UserError, match="was given in Python: give it again, as model="):
            check(config)
    check_network(config.replace(model="my_module:build"))  # the same function by another name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not a configuration"),
        (b"\xff\xfe", "config.json: 'utf-8' codec can't decode byte 0xff"),
        ("[]", "config.json: not a configuration: Expected `object`, got `array`"),
        ('{"bach_size": 3}', "config.json: there is no option 'bach_size'; did you mean"),
        ('{"batch_size": -3}', "config.json: batch_size is -3, but must be positive"),
    ],
)
def test_damaged_configuration(config, text, message):
    claim_model_dir(config, LABEL_NAMES)
    text = text if isinstance(text, bytes) else text.encode()
    pathlib.Path(config.model_dir, "config.json").write_bytes(text)
    for use in (
        lambda: claim_model_dir(config, LABEL_NAMES),
        lambda: read_config(config.model_dir),
    ):
        with pytest.raises(UserError, match=message):
            use()


def test_model_dir_that_is_a_file(config, tmp_path):
    (tmp_path / "run").write_text("not a directory")
    with pytest.raises(UserError, match=f"cannot write to model_dir {tmp_path}/run: .*; choose"):
        claim_model_dir(config, LABEL_NAMES)
    with pytest.raises(UserError, match=f"model_dir {tmp_path}/run/deeper: Not a directory"):
        claim_model_dir(config.replace(model_dir=f"{tmp_path}/run/deeper"), LABEL_NAMES)


def test_unwritable_directory(config, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(
        UserError, match=r"cannot write to model_dir .*/run: Permission denied; cho"
    ):
        claim_model_dir(config, LABEL_NAMES)


def test_only_the_chief_writes(config):
    claim_model_dir(config, LABEL_NAMES, chief=False)
    assert not pathlib.Path(config.model_dir, "config.json").exists()


def test_no_run(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} holds no training run: .* No such file"):
        read_config(str(tmp_path))
    with pytest.raises(UserError, match="no model: give --model_dir"):
        read_config("")


def test_model_dir_of_a_moved_run(config, tmp_path):
    claim_model_dir(config, LABEL_NAMES)
    shutil.move(config.model_dir, tmp_path / "elsewhere")
    assert read_config(str(tmp_path / "elsewhere")).model_dir == str(tmp_path / "elsewhere")


def test_missing_labels(config):
    claim_model_dir(config, LABEL_NAMES)
    pathlib.Path(config.model_dir, "labels.txt").unlink()
    with pytest.raises(UserError, match=r"run/labels.txt, the names of the run's classes, cannot "):
        read_labels(config.model_dir)


@pytest.mark.parametrize("labels", [b"", b"cat\ndo", b"\xff\n"])
def test_damaged_labels(config, labels):
    claim_model_dir(config, LABEL_NAMES)
    pathlib.Path(config.model_dir, "labels.txt").write_bytes(labels)
    with pytest.raises(UserError, match=r"run/labels.txt( is damaged|: 'utf-8')"):
        read_labels(config.model_dir)


def test_labels_may_have_unicode_line_separators(config):
    labels = ("new\u2028line", "form\x0cfeed", "e\x85nd")
    claim_model_dir(config, labels)
    assert read_labels(config.model_dir) == labels


def test_directory_name_that_is_a_glob_pattern(config, tmp_path):
    config = config.replace(model_dir=f"{tmp_path}/lr[0.1]")
    for use in (
        lambda: claim_model_dir(config, LABEL_NAMES),
        lambda: read_config(config.model_dir),
    ):
        with pytest.raises(UserError, match="TensorFlow cannot read files from paths"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time_trains_in_a_directory(config):
    claim_model_dir(config, LABEL_NAMES)
    for _ in range(2):
        with (
            alone_in(config.model_dir),
            pytest.raises(UserError, match="another process is training in model_dir"),
            alone_in(config.model_dir),
        ):
            pass


def test_a_supervised_training_waits_until_the_lock_of_a_lost_machine_is_gone(
    config, monkeypatch, capsys
):
    monkeypatch.setenv(TAKING_PART, "0")
    claim_model_dir(config, LABEL_NAMES)
    with contextlib.ExitStack() as lost:
        lost.enter_context(alone_in(config.model_dir))
        monkeypatch.setattr("time.sleep", lambda seconds: lost.close())
        with alone_in(config.model_dir):
            pass
    assert "waiting for another process" in capsys.readouterr().err


def test_the_best_checkpoint_of_a_run_that_was_partly_without_keep_best(config, capsys):
    best = pathlib.Path(config.model_dir, "best")
    best.mkdir(parents=True)
    rows = [{"kind": "validation", "step": step, "top1": step / 100} for step in (10, 20)]
    (best / "ckpt-20.index").touch()
    best.with_name("metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert checkpoint_of(config.model_dir, "best") == str(best / "ckpt-20")
    assert not capsys.readouterr().err
    (best / "ckpt-20.index").rename(best / "ckpt-10.index")
    assert checkpoint_of(config.model_dir, "best") == str(best / "ckpt-10")
    assert "best has the checkpoint of step 10, not that of the best" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["checkpoints", "best", "tensorboard/train", "checkpoints/ckpt-88.index", "labels.txt"]
)
def test_links_that_lead_elsewhere_are_refused(config, tmp_path, name):
    """TensorFlow writes an index through a link."""
    link = pathlib.Path(config.model_dir, name)
    link.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{name} is a link to .*elsewhere, where the run would"):
        claim_model_dir(config, LABEL_NAMES)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_directory_may_itself_be_a_link(config, tmp_path):
    (tmp_path / "disk").mkdir()
    pathlib.Path(config.model_dir).symlink_to(tmp_path / "disk")
    claim_model_dir(config, LABEL_NAMES)
    assert read_labels(config.model_dir) == LABEL_NAMES


def test_links_to_nothing_and_pipes_are_refused(config, tmp_path):
    checkpoints = pathlib.Path(config.model_dir, "checkpoints")
    checkpoints.mkdir(parents=True)
    (checkpoints / "ckpt-88.index").symlink_to(tmp_path / "new")
    with pytest.raises(UserError, match=r"is a link to .*new, where the run"):
        claim_model_dir(config, LABEL_NAMES)
    (checkpoints / "ckpt-88.index").unlink()
    os.mkfifo(checkpoints / "ckpt-88.index")
    with pytest.raises(UserError, match=r"index is neither a file nor a folder"):
        claim_model_dir(config, LABEL_NAMES)
    assert not (tmp_path / "new").exists()


def test_a_file_that_another_worker_renames_meanwhile(config, monkeypatch):
    claim_model_dir(config, LABEL_NAMES)
    walk = os.walk

    def walk_late(directory):
        for folder, folders, files in walk(directory):
            yield folder, folders, [".labels.txt.0123.tmp", *files]

    monkeypatch.setattr(os, "walk", walk_late)
    claim_model_dir(config, LABEL_NAMES)


def test_a_list_of_checkpoints_that_is_a_folder(config):
    folder = pathlib.Path(config.model_dir, "checkpoints")
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "ckpt-1.index").touch()
    with pytest.raises(UserError, match="checkpoints/checkpoint cannot be read: Is a directory"):
        latest_checkpoint(folder)


def test_a_list_of_checkpoints_of_gigabytes(config, tmp_path):
    folder = pathlib.Path(config.model_dir, "checkpoints")
    folder.mkdir(parents=True)
    with (folder / "checkpoint").open("wb") as file:
        file.truncate(2**40)
    (folder / "ckpt-3.index").touch()
    with pytest.raises(UserError, match="may have 1,048,576"):
        model_dir.checkpoint_steps(folder)
