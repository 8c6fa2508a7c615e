"""Checkpoints, and whose model_dir it is."""

import os
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from imagenet_fast import Config, UserError
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.training import checkpoint
from imagenet_fast.training.checkpoint import (
    Checkpoints,
    alone_in,
    check_labels,
    check_model_dir,
    claim_model_dir,
    read_config,
    read_labels,
    restore_weights,
)
from imagenet_fast.training.classifier import Classifier

IMAGES = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
LABELS = np.arange(8) % 3
LABEL_NAMES = ("cat", "dog", "grey wolf")


def make_model(units=5, seed=0, depth=1, loss_scale=False):
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input((4,))
    for _ in range(depth):
        x = keras.layers.BatchNormalization()(keras.layers.Dense(units)(x))
    model = Classifier(inputs, keras.layers.Dense(3)(x))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if loss_scale:
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            optimizer, initial_scale=8.0, dynamic_growth_steps=3
        )
    model.compile(optimizer)
    return model


def take_steps(model, count=1):
    for _ in range(count):
        model.train_on_batch(IMAGES, LABELS)


def variables_of(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def assert_equal(found, expected):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def config(tmp_path):
    return Config(model_dir=str(tmp_path / "run"))


@pytest.fixture
def saved(config):
    """A model, of which the checkpoint of step 2 is there."""
    model = make_model()
    take_steps(model, 2)
    Checkpoints(model, config).save(2, {"step": 2, "clock": {"train_seconds": 0.1}})
    return model


def steps_kept(config):
    files = pathlib.Path(config.model_dir, "checkpoints").glob("*.index")
    return sorted(int(file.stem.partition("-")[2]) for file in files)


# --- Saving and restoring


def test_nothing_to_restore(config):
    assert Checkpoints(make_model(), config).restore() is None


@pytest.mark.parametrize("loss_scale", [False, True])
def test_all_that_a_run_needs_comes_back(config, loss_scale):
    model = make_model(loss_scale=loss_scale)
    take_steps(model, 2)
    state = {"step": 2, "clock": {"train_seconds": 1 / 3}, "validation": {}}
    Checkpoints(model, config).save(2, state)
    other = make_model(seed=1, loss_scale=loss_scale)
    assert Checkpoints(other, config).restore() == state
    assert_equal(variables_of(other), variables_of(model))
    take_steps(model)
    take_steps(other)
    assert_equal(variables_of(other), variables_of(model))
    if loss_scale:
        # Doubled after three steps, two of them before.
        assert other.optimizer.loss_scale.numpy() == 16


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_ones_are_kept(config, keep):
    config = config.replace(keep_checkpoints=keep)
    model = make_model()
    take_steps(model)
    checkpoints = Checkpoints(model, config)
    for step in (3, 6, 9):
        checkpoints.save(step, {"step": step})
    assert steps_kept(config) == [3, 6, 9][-keep:]
    # Those of an earlier process are counted too.
    again = Checkpoints(model, config)
    assert again.restore() == {"step": 9}
    again.save(12, {"step": 12})
    assert steps_kept(config) == [6, 9, 12][-keep:]


def test_what_a_kill_leaves_of_a_checkpoint_is_ignored(config, saved):
    folder = pathlib.Path(config.model_dir, "checkpoints")
    (folder / "ckpt-3.data-00000-of-00001").write_bytes(b"half")
    (folder / "ckpt-3_temp").mkdir()
    (folder / "ckpt-3_temp" / "part-00000-of-00001.data-00000-of-00001").write_bytes(b"half")
    other = make_model(seed=1)
    checkpoints = Checkpoints(other, config)
    assert checkpoints.restore()["step"] == 2
    take_steps(other)
    checkpoints.save(3, {"step": 3})
    again = make_model(seed=2)
    assert Checkpoints(again, config).restore() == {"step": 3}
    assert_equal(variables_of(again), variables_of(other))


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [cut, flip_a_bit])
def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_is_taken(config, spoil):
    model = make_model()
    checkpoints = Checkpoints(model, config)
    take_steps(model)
    checkpoints.save(4, {"step": 4})
    weights = variables_of(model)
    take_steps(model)
    checkpoints.save(5, {"step": 5})
    folder = pathlib.Path(config.model_dir, "checkpoints")
    spoil(folder / "ckpt-5.data-00000-of-00001")
    other = make_model(seed=1)
    message = (
        rf"checkpoint {folder}/ckpt-5 is damaged \(.+\); remove its files, {folder}/ckpt-5\.\*"
    )
    with pytest.raises(UserError, match=message):
        Checkpoints(other, config).restore()
    with pytest.raises(UserError, match=message):
        restore_weights(other, config.model_dir)
    for path in folder.glob("ckpt-5.*"):
        path.unlink()
    assert Checkpoints(other, config).restore() == {"step": 4}
    assert_equal(variables_of(other), weights)


def test_a_directory_may_be_moved(config, saved, tmp_path):
    shutil.move(config.model_dir, tmp_path / "elsewhere")
    other = make_model(seed=1)
    moved = config.replace(model_dir=str(tmp_path / "elsewhere"))
    assert Checkpoints(other, moved).restore()["step"] == 2
    assert_equal(variables_of(other), variables_of(saved))


@pytest.mark.parametrize("other", [{"units": 6}, {"depth": 2}, {"loss_scale": True}], ids=str)
def test_another_models_checkpoint(config, saved, other):
    with pytest.raises(UserError) as caught:
        Checkpoints(make_model(**other), config).restore()
    assert f"checkpoint {config.model_dir}/checkpoints/ckpt-2 is not of this" in str(caught.value)
    assert str(caught.value).endswith("choose another --model_dir")
    assert "\n" not in str(caught.value)


def test_another_worker_keeps_nothing(config, saved, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", Cluster(("a:1", "b:1"), 1).to_tf_config())
    monkeypatch.setattr(checkpoint, "is_chief", lambda strategy: False)
    worker = make_model(seed=1)
    checkpoints = Checkpoints(worker, config)
    assert checkpoints.restore()["step"] == 2
    assert_equal(variables_of(worker), variables_of(saved))
    before = set(pathlib.Path(config.model_dir).rglob("*"))
    checkpoints.save(3, {"step": 3})
    own = pathlib.Path(checkpoints._manager.directory)
    assert (own / "ckpt-3.index").exists()
    checkpoints.close()
    assert not own.exists()
    assert set(pathlib.Path(config.model_dir).rglob("*")) == before


# --- Weights alone


@pytest.mark.parametrize("loss_scale", [False, True])
def test_weights_fit_whatever_the_optimizer(config, saved, loss_scale):
    model = make_model(seed=1, loss_scale=loss_scale)
    path = restore_weights(model, config.model_dir)
    assert path == f"{config.model_dir}/checkpoints/ckpt-2"
    assert_equal(model.get_weights(), saved.get_weights())


def test_weights_of_another_model(config, saved):
    for other in ({"units": 6}, {"depth": 2}):
        with pytest.raises(UserError, match="ckpt-2 is not of this model"):
            restore_weights(make_model(**other), config.model_dir)


def test_no_weights(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} holds no checkpoint: train there first"):
        restore_weights(make_model(), str(tmp_path))


# --- Whose directory it is


def test_a_new_directory_is_claimed(config):
    claim_model_dir(config, LABEL_NAMES)
    files = {path.name for path in pathlib.Path(config.model_dir).iterdir()}
    assert files == {"checkpoints", "config.json", "labels.txt"}
    assert read_config(config.model_dir) == config
    assert read_labels(config.model_dir) == LABEL_NAMES
    claim_model_dir(config, LABEL_NAMES)  # the same run goes on


def test_a_directory_is_checked_without_being_claimed(config):
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
def test_classes_that_have_no_names_are_only_counted(config, trained, labels):
    claim_model_dir(config, trained)
    check_labels(config, labels)


def test_what_has_no_part_in_the_weights_may_change(config, tmp_path):
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
        "holds a run with other options (duration is 90 epochs there, 8 epochs here; "
        "seed is 0 there, 3 here); choose another --model_dir, or remove that one"
    ) in str(caught.value)
    assert read_config(config.model_dir) == config


def test_checkpoints_of_nobody_knows_whom(config, saved):
    with pytest.raises(UserError, match="holds checkpoints but no config"):
        claim_model_dir(config, LABEL_NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not a configuration"),
        (b"\xff\xfe", "config.json: 'utf-8' codec can't decode byte 0xff"),
        ("[]", "config.json: not a configuration: expected a JSON object"),
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


def test_a_file_in_the_way(config, tmp_path):
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


def test_only_the_chief_writes(config, monkeypatch):
    monkeypatch.setattr(checkpoint, "is_chief", lambda strategy: False)
    claim_model_dir(config, LABEL_NAMES)
    assert not pathlib.Path(config.model_dir, "config.json").exists()


def test_no_run(tmp_path):
    for read in (read_config, read_labels):
        with pytest.raises(UserError, match=f"{tmp_path} holds no training run: .* No such file"):
            read(str(tmp_path))
    with pytest.raises(UserError, match="no model: give --model_dir"):
        read_config("")


def test_the_directorys_name_is_where_it_is_now(config, tmp_path):
    claim_model_dir(config, LABEL_NAMES)
    shutil.move(config.model_dir, tmp_path / "elsewhere")
    assert read_config(str(tmp_path / "elsewhere")).model_dir == str(tmp_path / "elsewhere")


@pytest.mark.parametrize("labels", [b"", b"cat\ndo", b"\xff\n"])
def test_damaged_labels(config, labels):
    claim_model_dir(config, LABEL_NAMES)
    pathlib.Path(config.model_dir, "labels.txt").write_bytes(labels)
    with pytest.raises(UserError, match=r"run/labels.txt( is damaged|: 'utf-8')"):
        read_labels(config.model_dir)


def test_labels_may_have_what_python_takes_for_ends_of_lines(config):
    labels = ("new\u2028line", "form\x0cfeed", "e\x85nd")
    claim_model_dir(config, labels)
    assert read_labels(config.model_dir) == labels


def test_a_directory_that_tensorflow_takes_for_a_pattern(config, tmp_path):
    config = config.replace(model_dir=f"{tmp_path}/lr[0.1]")
    for use in (
        lambda: claim_model_dir(config, LABEL_NAMES),
        lambda: read_config(config.model_dir),
        lambda: restore_weights(make_model(), config.model_dir),
    ):
        with pytest.raises(UserError, match="TensorFlow does not find files again in paths"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_no_space_for_a_checkpoint(config, saved, monkeypatch):
    checkpoints = Checkpoints(saved, config)
    half = pathlib.Path(config.model_dir, "checkpoints", "ckpt-3_temp")

    def full(**options):
        half.mkdir()
        raise tf.errors.ResourceExhaustedError(None, None, "part-0; No space left on device")

    monkeypatch.setattr(checkpoints._manager, "save", full)
    message = "ckpt-3 cannot be written .No space left on device.; when that is mended, the same"
    with pytest.raises(UserError, match=message):
        checkpoints.save(3, {})
    assert not half.exists()
    assert steps_kept(config) == [2]


def test_one_process_at_a_time_trains_in_a_directory(config):
    claim_model_dir(config, LABEL_NAMES)
    for _ in range(2):
        with (
            alone_in(config.model_dir),
            pytest.raises(UserError, match="another process is training in model_dir"),
            alone_in(config.model_dir),
        ):
            pass
