import keras
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.config import Config
from imagenet_fast.lab.benchmarks import step
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.training.build.model import build_classifier, build_model

CONFIG = Config(synthetic=True, num_classes=1000, image_size=64, batch_size=2, stride_on_1x1=True)


def products(model):
    """The shapes and strides of each convolution and matrix product, sorted."""
    return sorted(
        (tuple(layer.kernel.shape), getattr(layer, "strides", None), tuple(layer.output.shape))
        for layer in layers_in(model)
        if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense))
    )


@pytest.mark.long
def test_the_peer_is_the_same_network():
    labels = [str(label) for label in range(1000)]
    with shape_only():
        theirs = products(step.compiled(step.keras_application("ResNet50"), CONFIG))
        assert len(theirs) == 54
        assert products(build_classifier(CONFIG, labels)) == theirs
        assert products(build_classifier(CONFIG.replace(stride_on_1x1=False), labels)) != theirs


@pytest.mark.long
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("float32", marks=pytest.mark.long),
        pytest.param("mixed_bfloat16", marks=pytest.mark.long),
        "mixed_float16",
    ],
)
def test_the_peer_has_the_precision_and_float32_logits(precision):
    policy = keras.mixed_precision.global_policy()
    with shape_only():
        model = step.compiled(
            step.keras_application("ResNet50"), CONFIG.replace(precision=precision)
        )
    conv = next(layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D))
    assert conv.dtype_policy.name == precision
    assert model.output.dtype == tf.float32
    scaled = isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    assert scaled == (precision == "mixed_float16")
    assert keras.mixed_precision.global_policy() is policy


def small_network(num_classes, image_shape):
    """With a batch norm: a large network takes long to trace."""
    images = keras.Input(image_shape)
    layers = [keras.layers.BatchNormalization(), keras.layers.GlobalAveragePooling2D()]
    outputs = images
    for layer in [*layers, keras.layers.Dense(num_classes)]:
        outputs = layer(outputs)
    return keras.Model(images, outputs)


@pytest.mark.parametrize(
    ("network", "names"),
    [
        pytest.param(
            "",
            (
                "imagenet_fast",
                "ResNet50 in imagenet_fast",
                "ResNet50 under fit",
            ),
            marks=pytest.mark.long,
        ),
        (
            "MobileNetV3Small",
            ("MobileNetV3Small in imagenet_fast", "MobileNetV3Small under fit"),
        ),
    ],
)
def test_all_variants_train_the_same_steps(monkeypatch, network, names):
    models = []

    def build_small_model(config, **given):
        small = config if given else config.replace(model="resnet8", stride_on_1x1=False)
        models.append(build_model(small, **given))
        return models[-1]

    def compile_small_network(*args, **kwargs):
        models.append(compiled(*args, **kwargs))
        return models[-1]

    compiled = step.compiled
    monkeypatch.setattr(step, "build_model", build_small_model)
    monkeypatch.setattr(step, "compiled", compile_small_network)
    monkeypatch.setattr(step, "keras_application", lambda name: small_network)
    comparison = step.compare_steps(CONFIG, network=network, warmup=1, repeats=2, steps=3)
    assert comparison.names == names
    assert [int(model.optimizer.iterations) for model in models] == [9] * len(names)
    assert [len(times.seconds) for times in comparison.times] == [2] * len(names)
    assert all(min(times.seconds) > 0 for times in comparison.times)
    assert comparison.images == 6
    first = network or "ResNet50"
    assert comparison.title == f"{first}, 3 training steps: batch 2, 64 px, float32"
    assert comparison.notes[0].startswith("imagenet_fast: resnet50, stride") == (not network)
    assert "weight decay" in comparison.notes[-1]


@pytest.mark.parametrize(("model", "hint"), [("resnet18", "did you mean"), ("alexnet_bn", "from")])
def test_a_model_without_a_peer(model, hint):
    with pytest.raises(UserError, match=rf"Keras applications has no '{model}' .*{hint}"):
        step.compare_steps(CONFIG.replace(model=model, stride_on_1x1=False), warmup=1, repeats=1)


def test_a_network_that_keras_applications_lacks():
    with pytest.raises(UserError, match="'EfficientNetV2B00'; did you mean 'EfficientNetV2B0'"):
        step.compare_steps(CONFIG, network="EfficientNetV2B00", warmup=1, repeats=1)
