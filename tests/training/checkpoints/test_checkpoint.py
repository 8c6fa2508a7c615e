"""Checkpoints, whole, damaged and of other models."""

import gc
import logging
import pathlib
import shutil

import checkpoint_writer as writer
import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError
from imagenet_fast.base.keras_2 import KERAS_2, tensorflow_variables
from imagenet_fast.layers.seeds import draw_by_replica, seed_states
from imagenet_fast.optimizers.loss_scale import scaled_loss
from imagenet_fast.training.checkpoints import checkpoint
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints, restore_weights
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir
from imagenet_fast.training.step.classifier import Classifier

IMAGES = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
LABELS = np.arange(8) % 3
LABEL_NAMES = ("cat", "dog", "grey wolf")
CLOCK = {
    "train_seconds": 1 / 3,
    "timed_images": 16,
    "compile_seconds": 0.5,
    "wall_seconds": 1.5,
}


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
    """With gradients of 1, and no program to trace."""
    for _ in range(count):
        weights = model.trainable_variables
        model.optimizer.apply_gradients([(tf.ones_like(weight), weight) for weight in weights])
        for statistic in model.non_trainable_variables:
            statistic.assign_add(tf.ones_like(statistic))


def train(model, steps):
    for _ in range(steps):
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
    Checkpoints(model, config).save(2, {"step": 2, "clock": CLOCK})
    return model


def steps_kept(config):
    files = pathlib.Path(config.model_dir, "checkpoints").glob("*.index")
    return sorted(int(file.stem.partition("-")[2]) for file in files)


# --- Saving and restoring


def test_nothing_to_restore(config):
    assert Checkpoints(make_model(), config).restore() is None


@pytest.mark.parametrize("loss_scale", [pytest.param(False, marks=pytest.mark.long), True])
def test_all_that_a_run_needs_comes_back(config, loss_scale):
    model = make_model(loss_scale=loss_scale)
    train(model, 2)
    state = {"step": 2, "clock": CLOCK, "validation": {}}
    Checkpoints(model, config).save(2, state)
    other = make_model(seed=1, loss_scale=loss_scale)
    assert Checkpoints(other, config).restore() == state
    assert_equal(variables_of(other), variables_of(model))
    train(model, 1)
    train(other, 1)
    assert_equal(variables_of(other), variables_of(model))
    if loss_scale:
        # Doubled after three steps, two of them before.
        assert float(scaled_loss(other.optimizer, tf.constant(1.0))) == 16


@pytest.mark.skipif(KERAS_2, reason="Keras 2 has no seed generators")
def test_random_states_of_earlier_versions_come_back(config):
    """These had the type of Keras' generators, uint32."""

    def noisy():
        inputs = keras.Input((4,))
        hidden = keras.layers.GaussianNoise(0.1, seed=7)(inputs)
        model = Classifier(inputs, keras.layers.Dense(3)(hidden))
        model.compile(keras.optimizers.SGD(0.1))
        return model

    earlier, model = noisy(), noisy()
    (state,) = seed_states(earlier)
    state.assign([7, 41])
    Checkpoints(earlier, config).save(2, {"step": 2, "clock": CLOCK})
    draw_by_replica(model)
    (state,) = tensorflow_variables(seed_states(model))
    assert state.dtype == tf.int64
    assert Checkpoints(model, config).restore()["step"] == 2
    np.testing.assert_array_equal(state, [7, 41])
    # And from there on in today's type.
    Checkpoints(model, config).save(3, {"step": 3, "clock": CLOCK})
    state.assign([0, 0])
    assert Checkpoints(model, config).restore()["step"] == 3
    np.testing.assert_array_equal(state, [7, 41])


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


def test_a_directory_may_be_moved(config, saved, tmp_path):
    shutil.move(config.model_dir, tmp_path / "elsewhere")
    other = make_model(seed=1)
    moved = config.replace(model_dir=str(tmp_path / "elsewhere"))
    assert Checkpoints(other, moved).restore()["step"] == 2
    assert_equal(variables_of(other), variables_of(saved))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"units": 6}, "kernel has shape (4, 6), but (4, 5) there"),
        ({"depth": 2}, "kernel has shape (5, 5), but (5, 3) there"),
        ({"depth": 0}, "kernel has shape (4, 3), but (4, 5) there"),
        ({"loss_scale": True}, ""),
    ],
    ids=str,
)
def test_another_models_checkpoint(config, saved, other, reason, caplog):
    gc.collect()  # what other tests have left
    # Without the handler of the logger, pytest does not see what TensorFlow logs.
    logging.getLogger("tensorflow").addHandler(caplog.handler)
    with pytest.raises(UserError) as caught:
        Checkpoints(make_model(**other), config).restore()
    message = str(caught.value)
    assert f"checkpoint {config.model_dir}/checkpoints/ckpt-2 is another model's" in message
    assert reason in message
    assert message.endswith("give the model that was trained there, or choose another --model_dir")
    assert "\n" not in message
    # TensorFlow would warn when it deletes what it has not restored completely.
    del caught
    gc.collect()
    logging.getLogger("tensorflow").removeHandler(caplog.handler)
    assert not (reason and caplog.records)


def test_a_checkpoint_with_further_weights(config):
    """Which TensorFlow would leave out in silence."""
    inputs = keras.Input((3,))
    layers = [keras.layers.Dense(3, name=f"dense_of_{number}") for number in range(2)]
    larger = Classifier(inputs, layers[1](layers[0](inputs)))
    larger.compile(keras.optimizers.SGD(0.1))
    Checkpoints(larger, config).save(1, {"step": 1})
    smaller = Classifier(inputs, layers[0](inputs))
    with pytest.raises(UserError, match="the model has 2 weights, but 4 are there"):
        restore_weights(smaller, config.model_dir)


def test_other_workers_keep_no_files(config, saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "worker_place", lambda strategy: (2, 1))
    worker = make_model(seed=1)
    checkpoints = Checkpoints(worker, config)
    assert checkpoints.restore()["step"] == 2
    assert_equal(variables_of(worker), variables_of(saved))
    before = set(pathlib.Path(config.model_dir).rglob("*"))
    checkpoints.save(3, {"step": 3})
    checkpoints.save_best(3, {"step": 3})
    own = pathlib.Path(checkpoints._manager.directory)
    assert (own / "ckpt-3.index").exists()
    checkpoints.close()
    assert not own.exists()
    assert set(pathlib.Path(config.model_dir).rglob("*")) == before


# --- Weights alone


@pytest.mark.parametrize("loss_scale", [False, True])
def test_weights_are_restored_whatever_the_optimizer(config, saved, loss_scale):
    model = make_model(seed=1, loss_scale=loss_scale)
    path = restore_weights(model, config.model_dir)
    assert path == f"{config.model_dir}/checkpoints/ckpt-2"
    assert_equal(model.get_weights(), saved.get_weights())


def test_weights_of_another_model(config, saved):
    for other in ({"units": 6}, {"depth": 2}):
        with pytest.raises(UserError, match="ckpt-2 is another model's"):
            restore_weights(make_model(**other), config.model_dir)


def test_no_weights(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} holds no checkpoint: train there first"):
        restore_weights(make_model(), str(tmp_path))


def test_no_weights_in_a_path_that_is_a_glob_pattern(tmp_path):
    with pytest.raises(UserError, match="TensorFlow cannot read files from paths"):
        restore_weights(make_model(), f"{tmp_path}/lr[0.1]")


# --- The best evaluation


def test_the_best_weights_are_kept_beside_the_last_ones(config, saved):
    best = saved.get_weights()
    checkpoints = Checkpoints(saved, config)
    checkpoints.save_best(1, {"step": 1})
    checkpoints.save_best(2, {"step": 2})
    take_steps(saved)
    checkpoints.save(3, {"step": 3})
    folder = pathlib.Path(config.model_dir, "best")
    assert [path.stem for path in folder.glob("*.index")] == ["ckpt-2"]
    model = make_model(seed=1)
    assert restore_weights(model, config.model_dir, "best") == str(folder / "ckpt-2")
    assert_equal(model.get_weights(), best)
    # Runs resume from the last one, and replace the best one of an earlier process.
    again = Checkpoints(model, config)
    assert again.restore() == {"step": 3}
    assert_equal(variables_of(model), variables_of(saved))
    again.save_best(4, {"step": 4})
    assert [path.stem for path in folder.glob("*.index")] == ["ckpt-4"]


def test_no_best_weights(config, saved):
    with pytest.raises(UserError, match=r"no checkpoint of its best evaluation: .* --keep_best"):
        restore_weights(saved, config.model_dir, "best")
    with pytest.raises(UserError, match="checkpoint='bets' does not exist; did you mean 'best'"):
        restore_weights(saved, config.model_dir, "bets")


def test_damaged_best_weights(config, saved):
    Checkpoints(saved, config).save_best(2, {})
    (data,) = pathlib.Path(config.model_dir, "best").glob("*.data-*")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(UserError, match=r"best/ckpt-2 is damaged .*; --checkpoint=last is"):
        restore_weights(saved, config.model_dir, "best")


# --- What is in the way


def test_checkpoints_without_a_configuration(config, saved):
    with pytest.raises(UserError, match="holds checkpoints but no config"):
        claim_model_dir(config, LABEL_NAMES)


def test_full_disk(config, saved, monkeypatch):
    checkpoints = Checkpoints(saved, config)
    half = pathlib.Path(config.model_dir, "checkpoints", "ckpt-3_temp")

    def full(**options):
        half.mkdir()
        raise tf.errors.ResourceExhaustedError(None, None, "part-0; No space left on device")

    monkeypatch.setattr(checkpoints._manager, "save", full)
    message = "ckpt-3 cannot be written .No space left on device.; after fixing that, the same"
    with pytest.raises(UserError, match=message):
        checkpoints.save(3, {})
    assert not half.exists()
    assert steps_kept(config) == [2]


# --- Of others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["checkpoints", "best"])
@pytest.mark.parametrize("planted", ["../../precious/ckpt-4", "{root}/precious/*/[ct]*", "../../*"])
def test_only_checkpoints_of_the_run_are_removed(config, tmp_path, folder, planted):
    """TensorFlow's CheckpointManager removes all that the list names, also by patterns."""
    precious = [tmp_path / "precious" / name for name in ("ckpt-4.index", "of/tax.pdf")]
    for path in precious:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    model = make_model()
    take_steps(model)
    Checkpoints(model, config).save(2, {"step": 2})
    Checkpoints(model, config).save_best(2, {"step": 2})
    listed = pathlib.Path(config.model_dir, folder, "checkpoint")
    listed.write_text(
        'model_checkpoint_path: "ckpt-2"\n'
        f'all_model_checkpoint_paths: "{planted.format(root=tmp_path)}"\n'
        'all_model_checkpoint_paths: "ckpt-2"\n'
        "all_model_checkpoint_timestamps: 1.0\nall_model_checkpoint_timestamps: 2.0\n"
    )
    checkpoints = Checkpoints(make_model(), config.replace(keep_checkpoints=1))
    checkpoints.restore()
    for step in (3, 4, 5):
        checkpoints.save(step, {"step": step})
        checkpoints.save_best(step, {"step": step})
    assert all(path.read_text() == "precious" for path in precious)
    kept = {path.stem for path in listed.parent.glob("ckpt-*.index")}
    assert kept == {"ckpt-5"}


def test_a_list_without_checkpoints_removes_nothing(config, tmp_path):
    (tmp_path / "ckpt-1.index").write_text("precious")
    listed = pathlib.Path(config.model_dir, "checkpoints", "checkpoint")
    listed.parent.mkdir(parents=True)
    listed.write_text(
        'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "../../ckpt-1"\n'
    )
    model = make_model()
    take_steps(model)
    checkpoints = Checkpoints(model, config.replace(keep_checkpoints=1))
    assert checkpoints.restore() is None
    for step in (2, 3):
        checkpoints.save(step, {"step": step})
    assert (tmp_path / "ckpt-1.index").read_text() == "precious"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"step": "7"}, "Expected `int`, got `str`"),
        ({"step": -1}, "Expected `int` >= 0"),
        ({"step": 2, "clock": {**CLOCK, "train_seconds": None}}, "train_seconds"),
        ({"step": 2, "best": {"top1": [1]}}, "best"),
        ({"step": 2, "validation": {"top1": None}}, "top1"),
        ({"step": 2, "train_checksum": 5}, "train_checksum"),
    ],
)
def test_a_state_of_other_types(config, state, reason):
    model = make_model()
    take_steps(model)
    Checkpoints(model, config).save(2, state)
    with pytest.raises(UserError, match=reason):
        Checkpoints(make_model(), config).restore()


def test_folders_of_other_workers_have_no_fixed_name(config, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = pathlib.Path(checkpoint._temporary_folder(config.model_dir, 1))
    other = pathlib.Path(checkpoint._temporary_folder(config.model_dir, 2))
    assert first.stat().st_mode & 0o777 == 0o700
    (first / "left").touch()
    precious = tmp_path / "precious"
    (precious / "of").mkdir(parents=True)
    link = tmp_path / f"{first.name}2"
    link.symlink_to(precious)
    again = pathlib.Path(checkpoint._temporary_folder(config.model_dir, 1))
    assert again.is_dir() and not first.exists() and other.exists()  # what a killed one left
    assert (precious / "of").is_dir()


def claim(config, folder, shape):
    """Replaces the index of a run's checkpoint by one that claims a shape."""
    path = pathlib.Path(config.model_dir, folder, "ckpt-2.index")
    path.write_bytes(writer.table({b"": writer.header(), b"a": writer.entry(shape, 16)}))


@pytest.mark.parametrize("shape", [[2**62, 2**62], [-1]])
def test_a_checkpoint_that_would_end_the_process(config, shape, capsys):
    """BundleReader::GetValue of tensor_bundle.cc makes the tensor that the index claims."""
    model = make_model()
    take_steps(model)
    checkpoints = Checkpoints(model, config)
    checkpoints.save(1, {"step": 1})
    checkpoints.save(2, {"step": 2})
    checkpoints.save_best(2, {"step": 2})
    claim(config, "checkpoints", shape)
    claim(config, "best", shape)
    for which in ("last", "best"):
        with pytest.raises(UserError, match="claims what is not there: a has shape"):
            restore_weights(make_model(), config.model_dir, which)
    assert Checkpoints(make_model(), config).restore() == {"step": 1}
    assert "set aside as damaged-ckpt-2" in capsys.readouterr().err
