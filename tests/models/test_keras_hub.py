"""Presets of KerasHub, where it is installed."""

import json
import shutil

import keras
import numpy as np
import pytest
from small_config import SMALL

from imagenet_fast import build_model
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import to_path
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.models import network_of
from imagenet_fast.models.depth import blocks_of, name_of_block
from imagenet_fast.models.keras_hub import (
    build_preset,
    preset_folder,
    preset_image_size,
    preset_normalization,
    preset_weights,
)

keras_hub = pytest.importorskip("keras_hub")


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    """Folders of a ResNet and of a vision transformer, with random weights."""
    folder = tmp_path_factory.mktemp("presets")
    resnet = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 2],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
    )
    converter = keras_hub.layers.ResNetImageConverter(
        image_size=(48, 48), scale=[1 / 58, 1 / 57, 1 / 56], offset=[-2.0, -2.1, -1.9]
    )
    preprocessor = keras_hub.models.ResNetImageClassifierPreprocessor(converter)
    classifier = keras_hub.models.ResNetImageClassifier(
        resnet, num_classes=5, preprocessor=preprocessor
    )
    classifier.save_to_preset(str(folder / "resnet"))
    vit = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=8,
        num_layers=3,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    )
    keras_hub.models.ViTImageClassifier(vit, num_classes=5).save_to_preset(str(folder / "vit"))
    return folder, {"resnet": classifier, "vit": vit}


def test_a_preset_computes_what_keras_hub_does(presets):
    folder, made = presets
    network = build_preset(to_path(folder / "resnet"), 5, (32, 32, 3))
    weights = preset_weights(to_path(folder / "resnet"))
    theirs = made["resnet"]
    for own, value in zip(network.weights, [*weights, *theirs.weights[-2:]]):
        own.assign(value)
    pixels = np.random.RandomState(0).randint(0, 256, [2, 32, 32, 3]).astype(np.uint8)
    normalization = preset_normalization(to_path(folder / "resnet"))
    normalized = PixelNormalization(normalization.mean, normalization.std)(pixels)
    converter = theirs.preprocessor.image_converter
    converted = np.asarray(pixels * np.array(converter.scale) + np.array(converter.offset))
    np.testing.assert_allclose(normalized, converted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(network(normalized), theirs(converted), rtol=1e-4, atol=1e-5)
    assert preset_image_size(to_path(folder / "resnet")) == 48


def test_blocks(presets):
    folder, _ = presets
    names = [name_of_block(own) for own in blocks_of(build_preset(folder / "vit", 7, (16, 16, 3)))]
    assert names[0] == "vit_patching_and_embedding"
    assert names[1:] == [*(f"transformer_block_{i}" for i in (1, 2, 3)), "predictions"]
    names = [
        name_of_block(own) for own in blocks_of(build_preset(folder / "resnet", 7, (32, 32, 3)))
    ]
    blocks = ["stack0_block0", "stack1_block0", "stack1_block1"]
    assert names == ["conv1_conv", *blocks, "predictions"]


def changed(presets, tmp_path, change):
    shutil.copytree(presets[0] / "resnet", tmp_path / "changed")
    file = tmp_path / "changed" / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return to_path(tmp_path / "changed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.update(class_name="Lambda"), "describes 'Lambda', but must describe"),
        (lambda own: own.update(class_name=["x"]), "does not describe a network of KerasHub"),
        (
            lambda own: own["config"].update(
                block_type={"class_name": "Lambda", "config": {"function": "os.system"}}
            ),
            "block_type is described by classes",
        ),
        (lambda own: own["config"].update(block_type="none"), "ResNetBackbone cannot be made"),
        (
            lambda own: own["config"].update(stackwise_num_filters=[64, 10_000]),
            "need [0-9,]+ bytes of weights or more, but its file allows",
        ),
        (
            lambda own: own["config"].update(stackwise_num_blocks=[1, 10**9]),
            "need [0-9,]+ bytes of weights or more, but its file allows",
        ),
    ],
)
def test_a_folder_that_names_other_classes_is_refused(presets, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        build_preset(changed(presets, tmp_path, change), 5, (32, 32, 3))


def test_a_damaged_head_is_an_error(presets, tmp_path):
    folder = changed(presets, tmp_path, lambda config: None)
    task = json.loads((folder / "task.json").read_text())
    task["config"]["pooling"] = "median"
    (folder / "task.json").write_text(json.dumps(task))
    with pytest.raises(
        UserError, match=r"task\.json: ResNetImageClassifier cannot .*pooling=median"
    ):
        build_preset(folder, 5, (32, 32, 3))


def test_weights_of_another_network_are_refused(presets, tmp_path):
    def deeper(config):
        config["config"]["stackwise_num_blocks"] = [2, 2]

    with pytest.raises(UserError, match="does not hold the weights of config"):
        preset_weights(changed(presets, tmp_path, deeper))


@pytest.mark.parametrize("scale", [0, [1, 2], "1", [10**400] * 3, {"class_name": "x"}, [-1, 1, 1]])
def test_a_damaged_image_converter_is_an_error(presets, tmp_path, scale):
    folder = changed(presets, tmp_path, lambda config: None)
    file = folder / "image_converter.json"
    config = json.loads(file.read_text())
    config["config"]["scale"] = scale
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"std|damaged image converter"):
        normalization = preset_normalization(folder)
        PixelNormalization(normalization.mean, normalization.std)


def test_presets_that_are_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"neither a preset .*; did you mean .*resnet_50_imagenet"):
        preset_folder("resnet_50_imagenett")
    with pytest.raises(UserError, match=r"keras_hub:gone/away is neither a preset .* config.json$"):
        preset_folder("gone/away")
    with pytest.raises(UserError, match=f"is not in {tmp_path}/models/keras/resnet.*--pretrained"):
        preset_folder("resnet_50_imagenet")

    def refuse(*_):
        raise ConnectionError("unreachable")

    import kagglehub

    monkeypatch.setattr(kagglehub, "model_download", refuse)
    with pytest.raises(UserError, match=f"unreachable.*put its files into {tmp_path}/models/"):
        preset_folder("resnet_50_imagenet", download=True)


def test_a_preset_in_the_cache(presets, tmp_path, monkeypatch):
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))
    handle = keras_hub.models.ImageClassifier.presets["resnet_50_imagenet"]["kaggle_handle"]
    folder = tmp_path / "models" / handle.removeprefix("kaggle://")
    shutil.copytree(presets[0] / "resnet", folder)
    assert preset_folder("resnet_50_imagenet") == to_path(folder)


def test_precision_and_size_are_those_of_the_run(presets):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        network = build_preset(to_path(presets[0] / "resnet"), 5, (64, 64, 3))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert network.layers[1].compute_dtype == "bfloat16"
    assert network.output.dtype == "float32"
    assert network.input.shape == (None, 64, 64, 3)


def test_a_head_of_several_layers_is_new(tmp_path):
    """A preset's weights end before it."""
    backbone = keras_hub.models.VGGBackbone(
        stackwise_num_repeats=[1, 1], stackwise_num_filters=[4, 8], image_shape=(32, 32, 3)
    )
    backbone.save_to_preset(str(tmp_path / "vgg"))
    config = SMALL.replace(model=f"keras_hub:{tmp_path / 'vgg'}", image_size=32, pretrained=True)
    network = network_of(build_model(config))
    for own, value in zip(network.weights, backbone.get_weights()):
        np.testing.assert_array_equal(own, value)
    assert len(network.weights) > len(backbone.weights) + 2
