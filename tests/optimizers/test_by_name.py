"""Optimizers by name: those of Keras here, those of Addons where they are installed."""

import importlib.util

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL

from imagenet_fast import UserError, build_model, make_dataset
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.optimizers.by_name import make_optimizer
from imagenet_fast.optimizers.schedules import StepDecay

HAS_ADDONS = importlib.util.find_spec("tensorflow_addons") is not None
RUN = SMALL.replace(learning_rate=0.01, rate_scaling="none", warmup="0 epochs")


def make(name, **changes):
    options = {"momentum": 0.8, "weight_decay": 0.0, "undecayed": [], "clip_norm": None}
    return make_optimizer(name, StepDecay(0.25, [], 0.1), **{**options, **changes})


@pytest.mark.parametrize("name", ["adam", "Adam", "AdamW", "rmsprop", "nadam"])
def test_keras_optimizers(name):
    optimizer = make(name)
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    assert type(optimizer).__name__.lower() == name.lower()
    assert float(optimizer.learning_rate) == 0.25


def test_supported_options():
    optimizer = make("RMSprop", clip_norm=2.0)
    assert optimizer.momentum == 0.8
    assert optimizer.global_clipnorm == 2.0


def test_decay_by_role():
    """Of what is excluded nothing, of the rest a share of itself."""
    variables = [tf.Variable([2.0]), tf.Variable([2.0])]
    optimizer = make("adamw", weight_decay=0.5, undecayed=variables[1:])
    optimizer.build(variables)
    optimizer.apply_gradients([(tf.constant([0.0]), v) for v in variables])
    assert [v.numpy()[0] for v in variables] == [1.75, 2.0]


def test_epsilon():
    """With 1, RMSProp's first step is rate * gradient / sqrt(0.1 * gradient ** 2 + 1)."""
    variable = tf.Variable([0.0])
    make("rmsprop", momentum=0.0, epsilon=1.0).apply_gradients([(tf.constant([2.0]), variable)])
    np.testing.assert_allclose(variable, [-0.25 * 2 / np.sqrt(0.1 * 4 + 1)], rtol=1e-6)


def test_required_options():
    assert make("rmsprop", required=["momentum", "weight_decay"]).momentum == 0.8
    with pytest.raises(UserError, match="optimizer=adam has no momentum: leave it out"):
        make("adam", required=["momentum"])


@pytest.mark.skipif(not KERAS_2, reason="Keras 3's optimizers compile nothing")
def test_updates_are_not_compiled():
    """Else those of a pipeline fail on GPUs: its variables are on several devices."""
    assert not make("rmsprop").jit_compile
    assert not make("adam").jit_compile


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_trains(precision):
    model = build_model(RUN.replace(optimizer="adam", precision=precision, clip_norm=1.0))
    before = [v.numpy() for v in model.trainable_variables]
    model.fit(make_dataset(RUN, "train"), epochs=1, steps_per_epoch=2, verbose=0)
    assert max(np.abs(v.numpy() - b).max() for v, b in zip(model.trainable_variables, before)) > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adan", "did you mean 'adam'"),
        ("SGD", "did you mean 'sgd'"),
        ("Muon", "did you mean 'muon'"),
        ("", "choose from"),
        ("Optimizer", "does not exist"),
        ("tfa:", "write tfa:NAME"),
        ("tfa:LAMB(", "write tfa:NAME"),
    ],
)
def test_no_such_optimizer(name, message):
    with pytest.raises(UserError, match=message):
        build_model(RUN.replace(optimizer=name))


@pytest.mark.skipif(HAS_ADDONS, reason="TensorFlow Addons are installed")
def test_addons_elsewhere():
    with pytest.raises(UserError, match=r"TensorFlow 2.15: .*`pip install -e '\.\[addons\]'`"):
        build_model(RUN.replace(optimizer="tfa:LAMB"))


# --- Arguments, and a learning rate for each variable


def test_arguments_of_an_optimizer():
    optimizer = make("Lion", arguments=["beta_1=0.95", "beta_2= 1e-1"])
    assert (optimizer.beta_1, optimizer.beta_2) == (0.95, 0.1)
    for text, value in (("true", True), ("1", True), ("False", False), ("0", False)):
        assert make("adam", arguments=[f"amsgrad={text}"]).amsgrad is value


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("beta_3=1", "adamw has no beta_3; its arguments are beta_1, beta_2, amsgrad"),
        ("learning_rate=1", "give learning_rate by --learning_rate"),
        ("clipnorm=1", "give clipnorm by --clip_norm"),
        ("use_ema=true", "give use_ema by --ema_decay"),
        ("beta_1=high", "beta_1 is 'high', but must be a finite number"),
        ("beta_1=true", "beta_1 is 'true', but must be a finite number"),
        ("beta_1=none", "beta_1 is 'none', but must be a finite number"),
        ("beta_1=nan", "beta_1 is 'nan', but must be a finite number"),
        ("amsgrad=2", "amsgrad is '2', but must be true or false"),
        ("beta_1=0.8,beta_1=0.9", "beta_1 is there twice"),
    ],
)
def test_arguments_that_an_optimizer_does_not_have(argument, message):
    with pytest.raises(UserError, match=message):
        make("adamw", arguments=argument.split(","))


def test_a_wrapper_of_optimizers_has_no_name():
    with pytest.raises(UserError, match="'multioptimizer' does not exist"):
        make("multioptimizer")


@pytest.mark.skipif(KERAS_2, reason="needs Keras 3")
@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "adafactor", "rmsprop"])
def test_rate_factors_are_learning_rates_of_their_own(name):
    """Each variable takes the steps of an optimizer with this learning rate."""
    factors, random = [0.1, 1.0, 0.5], np.random.RandomState(0)
    starts = [random.randn(3, 2).astype(np.float32) for _ in factors]
    gradients = [[random.randn(3, 2).astype(np.float32) for _ in factors] for _ in range(3)]
    variables = [keras.Variable(start) for start in starts]
    options = {"weight_decay": 0.3, "clip_norm": None}
    optimizer = make(name, **options, undecayed=variables[1:2], rate_factors=factors)
    optimizer.build(variables)
    assert type(optimizer).__name__.lower() == name
    for step in gradients:
        optimizer.apply(step, variables)
    for index, factor in enumerate(factors):
        alone = keras.Variable(starts[index])
        theirs = getattr(keras.optimizers, type(optimizer).__name__)(
            learning_rate=0.25 * factor,
            **({"momentum": 0.8} if name == "rmsprop" else {}),
            weight_decay=0.3 if index != 1 else 0.0,
        )
        theirs.build([alone])
        for step in gradients:
            theirs.apply([step[index]], [alone])
        np.testing.assert_allclose(variables[index].numpy(), alone.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not KERAS_2, reason="of Keras 2")
def test_rate_factors_need_keras_3():
    with pytest.raises(UserError, match="layer_decay is not for optimizer=adam with Keras 2"):
        make("adam", rate_factors=[0.5])
