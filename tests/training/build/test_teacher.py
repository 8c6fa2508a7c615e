"""The teacher is the network of another run, with the weights that it evaluates."""

import shutil

import numpy as np
import pytest
from small_config import SMALL

from imagenet_fast import UserError, build_model, train
from imagenet_fast.models import network_of
from imagenet_fast.training.build import teacher
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.checkpoints.checkpoint import Checkpoints
from imagenet_fast.training.checkpoints.model_dir import claim_model_dir

CLASSES = tuple(map(str, range(10)))


def make_run(directory, classes=CLASSES, **changes):
    """Writes a run whose weights no seed gives, and returns its model."""
    config = SMALL.replace(model_dir=str(directory), **changes)
    model = build_classifier(config, classes)
    model.compile(optimizer="sgd")
    random = np.random.RandomState(0)
    for variable in model.weights:
        variable.assign(random.uniform(0.5, 1.0, variable.shape))
    if config.ema_decay:  # which has those, and the weights themselves others
        model.restart_shadow_weights()
        model.trainable_variables[0].assign_add(model.trainable_variables[0])
    claim_model_dir(config, classes)
    Checkpoints(model, config).save(1, {})
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher")
    make_run(directory, ema_decay=0.9, precision="mixed_bfloat16")
    return str(directory)


def test_a_teacher_has_the_averaged_weights_of_its_run(path, tmp_path):
    expected = make_run(tmp_path / "again", ema_decay=0.9)
    alone = build_model(SMALL)
    model = build_model(SMALL.replace(teacher=path, distillation_temperature=2.0))
    assert model.teacher.temperature == 2
    assert model.teacher.name == f"resnet8 of {path}"
    images = np.random.RandomState(1).randint(0, 256, (4, 16, 16, 3)).astype(np.uint8)
    with expected.averaged_weights():
        np.testing.assert_allclose(
            model.teacher.logits(images), expected(images, training=False), rtol=1e-5
        )
    # It neither is part of the student nor changes where that starts.
    for own, other in zip(model.weights, alone.weights, strict=True):
        np.testing.assert_array_equal(own, other)
    assert len(network_of(model).weights) == len(network_of(alone).weights)


def test_workers_that_read_other_weights_of_a_teacher_are_told(path, monkeypatch):
    said = []
    monkeypatch.setattr(teacher, "check_consistent", lambda *own: said.append(own))
    model = build_model(SMALL.replace(teacher=path))
    ((strategy, what, value, advice),) = said
    assert (strategy, what) == (model.distribute_strategy, "the teacher")
    assert value == f"weights of checksum {model.teacher.checksum}"
    assert f"--teacher={path} must be a directory that all workers share" in advice


@pytest.mark.parametrize(
    ("classes", "changes", "message"),
    [
        (CLASSES[:9], {"num_classes": 9}, "has 9 classes, but the data have 10: give one that"),
        ((*CLASSES[:9], "x"), {}, "has 'x' as class 9, which is '9' in the data: give one that"),
        (CLASSES, {"loss": "binary_cross_entropy"}, "trained with --loss=binary_cross_entropy"),
        (CLASSES, {"model": "my:net"}, "teacher: the network of the run in .* is code, my:net"),
    ],
)
def test_teachers_that_do_not_fit(tmp_path, classes, changes, message):
    config = SMALL.replace(model_dir=str(tmp_path), **changes)
    claim_model_dir(config, classes)
    with pytest.raises(UserError, match=message):
        build_model(SMALL.replace(teacher=str(tmp_path)))


def test_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match="missing does not exist: train that run first"):
        build_model(SMALL.replace(teacher=str(tmp_path / "missing")))
    with pytest.raises(UserError, match="holds no training run: give the model_dir of one; exp"):
        build_model(SMALL.replace(teacher=str(tmp_path)))


class StopError(Exception):
    pass


def test_a_run_that_was_killed_ends_with_the_same_bits(path, tmp_path, monkeypatch, capfd):
    """And does not resume with another teacher, or none; its folder may have moved."""
    config = SMALL.replace(
        teacher=path,
        mixup_alpha=0.2,
        batch_size=8,
        duration="4 steps",
        warmup="0 steps",
        decay_at="3 steps",
        checkpoint_every="2 steps",
        eval_every="4 steps",
        log_every="1 step",
        steps_per_call="1",
        examine=False,
        tensorboard=False,
    )
    whole, killed = (config.replace(model_dir=str(tmp_path / name)) for name in "ab")
    train(whole)
    assert f"; teacher: resnet8 of {path}" in capfd.readouterr().err
    save = Checkpoints.save

    def save_and_stop(self, step, state):
        save(self, step, state)
        raise StopError

    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(Checkpoints, "save", save_and_stop)
        train(killed)
    other = tmp_path / "other"
    model = make_run(other)
    model.trainable_variables[0].assign_add(model.trainable_variables[0])
    Checkpoints(model, SMALL.replace(model_dir=str(other))).save(2, {})
    with pytest.raises(UserError, match="has other weights than those from which the run in"):
        train(killed.replace(teacher=str(other)))
    with pytest.raises(UserError, match="learns from a teacher: give its model_dir as --teacher"):
        train(killed.replace(teacher=""))
    shutil.copytree(path, tmp_path / "moved")
    train(killed.replace(teacher=str(tmp_path / "moved")))
    first, second = (load(own) for own in (whole, killed))
    assert len(first) > 20
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)


def load(config):
    model = build_model(config.replace(teacher=""))
    assert Checkpoints(model, config).restore()["step"] == 4
    return [own.numpy() for own in model.weights]
