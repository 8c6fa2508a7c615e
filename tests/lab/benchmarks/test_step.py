import keras
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.lab.benchmarks import step
from imagenet_fast.models.shape_only import shape_only
from imagenet_fast.training.build.model import build_classifier, build_model

CONFIG = Config(synthetic=True, num_classes=1000, image_size=64, batch_size=2, stride_on_1x1=True)


def products(model):
    """The shapes and strides of each convolution and matrix product, sorted."""
    return sorted(
        (tuple(layer.kernel.shape), getattr(layer, "strides", None), tuple(layer.output.shape))
        for layer in model.submodules
        if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense))
    )


@pytest.mark.long
def test_the_peer_is_the_same_network():
    labels = [str(label) for label in range(1000)]
    with shape_only():
        theirs = products(step.keras_model(CONFIG))
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
        model = step.keras_model(CONFIG.replace(precision=precision))
    conv = next(layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D))
    assert conv.dtype_policy.name == precision
    assert model.output.dtype == tf.float32
    scaled = isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    assert scaled == (precision == "mixed_float16")
    assert keras.mixed_precision.global_policy() is policy


@pytest.mark.long
def test_both_models_train(monkeypatch):
    """With small networks, because large ones take long to trace."""
    models = {}

    def small_model(config):
        models["ours"] = build_model(config.replace(model="resnet8", stride_on_1x1=False))
        return models["ours"]

    def small_peer(config):
        pool, dense = keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(config.num_classes)
        models["theirs"] = keras.Sequential([pool, dense])
        models["theirs"].compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
        return models["theirs"]

    monkeypatch.setattr(step, "build_model", small_model)
    monkeypatch.setattr(step, "keras_model", small_peer)
    comparison = step.compare_steps(CONFIG, warmup=1, repeats=2, steps=3)
    assert {name: int(model.optimizer.iterations) for name, model in models.items()} == {
        "ours": 9,
        "theirs": 9,
    }
    assert [len(times.seconds) for times in comparison.times] == [2, 2]
    assert all(min(times.seconds) > 0 for times in comparison.times)
    assert comparison.images == 6
    assert comparison.title == "resnet50, 3 training steps: batch 2, 64 px, float32"
    assert comparison.notes[0].startswith("The same network")
    assert "weight decay" in comparison.notes[1]


@pytest.mark.parametrize(("model", "hint"), [("resnet18", "did you mean"), ("alexnet_bn", "from")])
def test_a_model_without_a_peer(model, hint):
    with pytest.raises(UserError, match=rf"Keras applications has no '{model}' .*{hint}"):
        step.compare_steps(CONFIG.replace(model=model, stride_on_1x1=False), warmup=1, repeats=1)
