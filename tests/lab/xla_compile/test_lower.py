"""Lowering: the step is the one that trains, and errors name their cause."""

import pytest
import tensorflow as tf

from imagenet_fast import UserError, build_model
from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.distribute.virtual import VirtualTPUStrategy
from imagenet_fast.lab.xla_compile.check import check_types
from imagenet_fast.lab.xla_compile.lower import lower_step, variables_of
from imagenet_fast.models import alexnet
from imagenet_fast.optimizers.loss_scale import scaled_loss
from imagenet_fast.training.step.classifier import Classifier


def test_all_that_training_changes_is_changed(lower_anew, monkeypatch):
    # Of AlexNet's 22 million weights 17 are between two layers, which may as well be narrower.
    dense = alexnet._dense
    narrow = lambda x, units, *args, **kwargs: dense(x, min(units, 64), *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(alexnet, "_dense", narrow)
    copies = {"ema_decay": 0.9, "lookahead_every": 2}
    found = lower_anew(**copies, dropout=0.5, model="alexnet_bn", image_size=64)
    changed = {
        found.step.arguments[parameter].ref() for parameter in found.step.module.updates.values()
    }
    rest = {variable.ref() for variable in variables_of(found.model)} - changed
    assert not rest
    (steps,) = tensorflow_variables([found.model.optimizer.iterations])
    assert steps.ref() in changed


def test_the_model_s_own_step_is_lowered(lower_anew, monkeypatch):
    calls = []
    original = Classifier.train_step

    def seen(self, data):
        calls.append(tf.distribute.get_replica_context())
        return original(self, data)

    monkeypatch.setattr(Classifier, "train_step", seen)
    lower_anew()
    assert calls
    assert all(isinstance(context.strategy, VirtualTPUStrategy) for context in calls)


def test_an_operation_that_xla_refuses_is_named(lower_anew, monkeypatch):
    original = Classifier.batch

    def through_python(self, data, split):
        images, labels, weights = original(self, data, split)
        seen = tf.numpy_function(lambda values: values, [labels], labels.dtype, name="spy")
        return images, tf.ensure_shape(seen, labels.shape), weights

    monkeypatch.setattr(Classifier, "batch", through_python)
    with pytest.raises(UserError, match=r"the training step: .* for \w*PyFunc \(of .*spy\)"):
        lower_anew()


def test_half_precision_that_keras_has_not_for_tpus(lower_anew):
    with pytest.raises(UserError, match=r"mixed_float16 is not for TPUs.* use mixed_bfloat16"):
        lower_anew(precision="mixed_float16")


@pytest.mark.long
def test_half_precision_of_gpus(lowered):
    found = lowered("GPU", precision="mixed_float16")
    checks = check_types(found.step, found.config, 8, 10)
    assert {own.name: own.found for own in checks}["convolutions"] == "21 of f16"
    assert not any(own.wrong for own in checks)
    # The loss scale, which adapts, is a part of the step.
    assert float(scaled_loss(found.model.optimizer, tf.constant(1.0))) == 2**15
    changed = [found.step.arguments[number] for number in found.step.module.updates.values()]
    assert any("dynamic_scale" in getattr(own, "name", "") for own in changed)


@pytest.mark.long
def test_one_core(lowered):
    config = lowered().config
    model = build_model(config, VirtualTPUStrategy([(0, 0, 0, 0)]))
    step = lower_step(model, config.batch_size, config.image_size)
    assert len(step.module.parameters) == len(lowered().step.module.parameters)
