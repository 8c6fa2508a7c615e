"""Blocks of networks, from the input to the head."""

import keras
import pytest

from imagenet_fast import models
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.models.depth import blocks_of, name_of_block

RESNET50 = [
    "conv1_conv",
    *(
        f"conv{stage}_block{i + 1}"
        for stage, n in zip((2, 3, 4, 5), (3, 4, 6, 3))
        for i in range(n)
    ),
    "logits",
]
CONVNEXT = ["convnext_tiny_stem_conv"]
for stage, depth in enumerate((3, 3, 9, 3)):
    CONVNEXT += [f"convnext_tiny_downsampling_block_{stage - 1}"] if stage else []
    CONVNEXT += [f"convnext_tiny_stage_{stage}_block_{i}" for i in range(depth)]
CONVNEXT += ["logits"]


def blocks(network):
    found = blocks_of(network)
    # Each weight is in one block.
    ids = [id(weight) for block in found for layer in block for weight in layer.weights]
    assert len(ids) == len({*ids})
    assert {*ids} == {id(weight) for weight in network.weights}
    return [name_of_block(block) for block in found]


def test_blocks_of_this_packages_resnets():
    names = blocks(models.build("resnet50", 7, (32, 32, 3)))
    expected = [f"stage{i + 1}_block{j + 1}" for i, n in enumerate((3, 4, 6, 3)) for j in range(n)]
    assert names == ["stem_conv", *expected, "logits"]
    names = blocks(models.build("resnet20", 7, (32, 32, 3)))
    expected = [f"stage{i}_block{j}" for i in (1, 2, 3) for j in (1, 2, 3)]
    assert names == ["stem_conv", *expected, "logits"]


@pytest.mark.skipif(KERAS_2, reason="needs Keras 3")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ResNet50", RESNET50),
        ("ConvNeXtTiny", CONVNEXT),
        ("VGG16", [*(f"block{i}" for i in range(1, 6)), "logits"]),
        ("MobileNet", ["conv1", *(f"conv_pw_{i}" for i in range(1, 14)), "logits"]),
        pytest.param(
            "Xception", [*(f"block{i}" for i in range(1, 15)), "logits"], marks=pytest.mark.long
        ),
        pytest.param(
            "MobileNetV3Small",
            [
                *("conv", "expanded_conv"),
                *(f"expanded_conv_{i}" for i in range(1, 11)),
                *("conv_1", "logits"),
            ],
            marks=pytest.mark.long,
        ),
    ],
)
def test_blocks_of_keras_applications(name, expected):
    from imagenet_fast.models.applications import build_application

    assert blocks(build_application(name, 7, (96, 96, 3))) == expected


@pytest.mark.skipif(KERAS_2, reason="needs Keras 3")
@pytest.mark.parametrize(
    ("name", "number"),
    [
        # Five convolutions and eleven mixed blocks, whose layers have no names of their own.
        ("InceptionV3", 5 + 11 + 1),
        pytest.param("EfficientNetB0", 1 + 16 + 1 + 1, marks=pytest.mark.long),
        pytest.param("DenseNet121", 1 + 58 + 3 + 1, marks=pytest.mark.long),
        pytest.param("MobileNet", 1 + 13 + 1, marks=pytest.mark.long),
        pytest.param("NASNetMobile", 1 + 2 + 12 + 2 + 1, marks=pytest.mark.long),
    ],
)
def test_number_of_blocks(name, number):
    from imagenet_fast.models.applications import build_application

    assert len(blocks(build_application(name, 7, (96, 96, 3)))) == number


def test_blocks_of_layers_without_names_are_between_single_tensors():
    x = images = keras.Input((8, 8, 3))
    x = keras.layers.BatchNormalization(name="first")(x)
    x = keras.layers.Conv2D(4, 3, name="a")(x)
    x = keras.layers.BatchNormalization(name="b")(x)
    y = keras.layers.Conv2D(4, 3, padding="same", name="c")(x)
    x = keras.layers.Add()([y, keras.layers.Conv2D(4, 1, name="d")(x)])
    x = keras.layers.Flatten()(x)
    network = keras.Model(images, keras.layers.Dense(2, name="e")(x))
    found = [{layer.name for layer in block} for block in blocks_of(network)]
    assert found == [{"first", "a", "b"}, {"c", "d"}, {"e"}]


def test_blocks_inside_of_models_and_layers():
    class Part(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def build(self, shape):
            self.dense.build(shape)
            super().build(shape)

        def call(self, x):
            return self.dense(x)

        def compute_output_shape(self, shape):
            return shape

    class Encoder(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [Part() for _ in range(3)]
            self.norm = keras.layers.LayerNormalization()

        def build(self, shape):
            for part in [*self.parts, self.norm]:
                part.build(shape)
            super().build(shape)

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return self.norm(x)

        def compute_output_shape(self, shape):
            return shape

    inner = keras.Input([4])
    backbone = keras.Model(inner, Encoder()(keras.layers.Dense(4, name="embed")(inner)))
    images = keras.Input([4])
    network = keras.Model(images, keras.layers.Dense(2, name="head")(backbone(images)))
    names = blocks(network)
    assert (names[0], len(names), names[-1]) == ("embed", 5, "head")
    assert [type(own).__name__ for own in blocks_of(network)[3]] == ["Part", "LayerNormalization"]
