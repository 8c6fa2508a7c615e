import keras
import pytest
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.lab.benchmarks.optimizer import compare as optimizer
from imagenet_fast.optimizers import LARS, SGD, Role, variable_roles


@pytest.mark.long
def test_all_optimizers_update_all_variables(monkeypatch):
    """With a small network in place of the large one."""
    updaters = {}
    make_updater = optimizer._updater

    def remember(own, start, gradients):
        updaters[type(own)] = (own, start, gradients)
        return make_updater(own, start, gradients)

    monkeypatch.setattr(optimizer, "_updater", remember)
    comparison = optimizer.compare_optimizers("resnet8", warmup=2, repeats=3)
    assert comparison.names == (
        "imagenet_fast LARS",
        "imagenet_fast SGD",
        "Keras legacy SGD",
        "Keras SGD",
    )
    kinds = [LARS, SGD, keras.optimizers.legacy.SGD, keras.optimizers.SGD]
    assert list(updaters) == kinds
    for own, start, gradients in updaters.values():
        assert int(own.iterations) == 5
        assert [g.shape for g in gradients] == [v.shape for v in start]
        assert all(v.dtype == tf.float32 for v in start)
    assert [len(times.seconds) for times in comparison.times] == [3] * 4
    assert all(min(times.seconds) > 0 for times in comparison.times)
    assert comparison.ratios.keys() == set(comparison.names[1:])
    network = models.build("resnet8", 1000, (224, 224, 3))
    count = network.count_params() - sum(w.shape[0] for w in network.non_trainable_weights)
    assert comparison.title == (
        f"resnet8, one update: {len(network.trainable_variables)} variables, "
        f"{count:,} parameters, float32"
    )
    assert "Without Model Garden" in comparison.notes[-1]


@pytest.mark.long
def test_what_is_decayed_and_scaled(monkeypatch):
    made = []
    make_updater = optimizer._updater
    monkeypatch.setattr(
        optimizer, "_updater", lambda own, *rest: made.append(own) or make_updater(own, *rest)
    )
    optimizer.compare_optimizers("resnet8", warmup=1, repeats=1)
    roles = variable_roles(models.build("resnet8", 1000, (224, 224, 3)))
    lars, sgd, *_ = made
    assert lars.weight_decay_mask == lars.trust_mask == [role is Role.WEIGHT for role in roles]
    assert sgd.weight_decay_mask == [role in (Role.WEIGHT, Role.BIAS) for role in roles]
    assert [own.get_config()["momentum"] for own in made] == pytest.approx([0.9] * 4)


def test_no_such_model():
    with pytest.raises(UserError, match=r"there is no model 'resnet7'.*did you mean"):
        optimizer.compare_optimizers("resnet7", warmup=1, repeats=1)


def test_no_such_environment(tmp_path):
    with pytest.raises(
        UserError, match=r"bin/python: No such file or directory; tools/model_garden\.sh"
    ):
        optimizer.compare_optimizers("resnet8", warmup=1, repeats=1, model_garden=str(tmp_path))
