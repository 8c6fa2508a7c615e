import keras
import numpy as np
import pytest

from imagenet_fast.config import Config
from imagenet_fast.optimizers import Role, variable_roles
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.build.optimizer import build_optimizer

W, B, SCALE, SHIFT = Role.WEIGHT, Role.BIAS, Role.SCALE, Role.SHIFT


def roles_of(*layers, shape=(8, 8, 4)):
    return variable_roles(keras.Sequential([keras.Input(shape), *layers]))


@pytest.mark.parametrize(
    ("layer", "roles"),
    [
        (keras.layers.Conv2D(3, 3), [W, B]),
        (keras.layers.Conv2D(3, 3, use_bias=False), [W]),
        (keras.layers.DepthwiseConv2D(3), [W, B]),
        (keras.layers.SeparableConv2D(3, 3), [W, W, B]),
        (keras.layers.Dense(3), [W, B]),
        (keras.layers.EinsumDense("abcd,de->abce", (8, 8, 5), bias_axes="e"), [W, B]),
        (keras.layers.BatchNormalization(), [SCALE, SHIFT]),
        (keras.layers.BatchNormalization(scale=False), [SHIFT]),
        (keras.layers.BatchNormalization(center=False), [SCALE]),
        (keras.layers.LayerNormalization(), [SCALE, SHIFT]),
        (keras.layers.GroupNormalization(2), [SCALE, SHIFT]),
        (keras.layers.PReLU(), [W]),
        (keras.layers.ReLU(), []),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_layers_of_keras(layer, roles):
    assert roles_of(layer) == roles


def test_names_have_no_effect():
    assert roles_of(
        keras.layers.Dense(3, name="gamma"),
        keras.layers.Dense(3, name="batch_normalization", use_bias=False),
        keras.layers.BatchNormalization(name="dense_kernel"),
        keras.layers.Conv2D(3, 1, name="bias", use_bias=False),
        keras.layers.Conv2D(3, 1, name="beta"),
    ) == [W, B, W, SCALE, SHIFT, W, W, B]


def test_order_is_that_of_the_trainable_variables():
    first, frozen, last = (keras.layers.Dense(3) for _ in range(3))
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), first, norm, frozen, last])
    frozen.trainable = False
    assert variable_roles(model) == [W, B, SCALE, SHIFT, W, B]
    norm.trainable = False
    assert variable_roles(model) == [W, B, W, B]


def test_layers_inside_models_and_layers():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
            self.bias = None
            self.gamma = self.add_weight(name="temperature", shape=())

        def call(self, inputs):
            for part in self.parts:
                inputs = part(inputs)
            return inputs * self.gamma

    inner = keras.Sequential([keras.Input((8, 8, 4)), Block()])
    model = keras.Sequential([keras.Input((8, 8, 4)), inner, keras.layers.Dense(2)])
    roles = {id(v): role for v, role in zip(model.trainable_variables, variable_roles(model))}
    block = inner.layers[0]
    dense, norm = block.parts
    expected = [
        (block.gamma, SCALE),
        (dense.kernel, W),
        (dense.bias, B),
        (norm.gamma, SCALE),
        (norm.beta, SHIFT),
    ]
    assert [roles[id(variable)] for variable, _ in expected] == [role for _, role in expected]
    assert len(roles) == 7


@pytest.mark.long
def test_resnet50_decays_all_but_the_scales_and_shifts_of_batch_norm():
    config = Config()
    model = build_classifier(config, [str(label) for label in range(1000)])
    model.steps_per_epoch = 5004
    variables, roles = model.trainable_variables, variable_roles(model)
    sizes = {role: [] for role in Role}
    for variable, role in zip(variables, roles):
        sizes[role].append(int(np.prod(variable.shape)))

    assert len(roles) == len(variables) == 161
    assert {role: len(sizes[role]) for role in Role} == {W: 54, B: 1, SCALE: 53, SHIFT: 53}
    assert sum(sizes[W]) == 25_502_912
    assert sum(sizes[B]) == 1_000
    assert sum(sizes[SCALE]) == sum(sizes[SHIFT]) == 26_560

    optimizer = build_optimizer(config, model, model.steps_per_epoch)
    decayed = [v for v, decay in zip(variables, optimizer.weight_decay_mask) if decay]
    assert sum(int(np.prod(v.shape)) for v in decayed) == 25_503_912
    assert optimizer.l2_weight_decay == 1e-4
