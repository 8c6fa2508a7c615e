"""From options to a model: seeds, precisions, and the numbers of Goyal et al. 2017."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_config import SMALL
from small_network import small_network

from imagenet_fast import Config, UserError, build_model, models
from imagenet_fast.base.keras_2 import KERAS_2, layers_in, name_of
from imagenet_fast.base.notices import warn_once
from imagenet_fast.distribute.pipeline_strategy import PipelineStrategy
from imagenet_fast.optimizers import SGD
from imagenet_fast.optimizers.loss_scale import scaled_loss
from imagenet_fast.optimizers.slots import unwrapped
from imagenet_fast.training.build import model as build
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.build.network import with_stages_for_devices
from imagenet_fast.training.build.schedule import build_schedule
from imagenet_fast.training.run import make_run

RECIPES = pathlib.Path(__file__).parents[3] / "imagenet_fast" / "flags"
# As large as ImageNet; no data is read.
SYNTHETIC = {"synthetic": True, "num_classes": 1000}


def batch_norms(model):
    return [
        layer for layer in layers_in(model) if isinstance(layer, keras.layers.BatchNormalization)
    ]


def test_a_warning_of_an_average_that_keeps_the_initial_weights(capsys):
    """0.99 ** 80 = 0.45; Page's 0.99 over 980 steps leaves 5e-5."""
    for steps, decay in (80, 0.99), (980, 0.99), (8, 0.8):
        config = SMALL.replace(duration=f"{steps} steps", ema_decay=decay)
        build._warn_of_initial_weights(make_run(config))
    first, second = capsys.readouterr().err.splitlines()
    assert "will be 45% the initial ones" in first and "ema_decay is 0.99 for 80 steps" in first
    assert "give --ema_decay=0.88 or less" in first and "give --ema_decay=0" in second
    build_model(SMALL.replace(duration="60 steps", ema_decay=0.97))
    assert "will be 16% the initial ones" in capsys.readouterr().err


@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy"])
def test_sigmoids_start_at_equal_probabilities_in_our_networks_only(loss):
    config = SMALL.replace(loss=loss)
    for own in (None, small_network):
        bias = models.head(models.network_of(build_model(config, model=own))).bias.numpy()
        changed = loss == "binary_cross_entropy" and own is None
        np.testing.assert_allclose(bias, -np.log(len(bias)) if changed else 0.0, rtol=1e-6)


def test_a_network_in_the_place_of_the_strategy():
    with pytest.raises(UserError, match=r"small_network.* is no strategy: give a .* as model="):
        build_model(SMALL, small_network)


def test_what_is_trainable_changes_after_the_optimizer_is_made():
    model = build_model(SMALL)
    models.head(models.network_of(model)).trainable = False
    with pytest.raises(UserError, match="compile the model with a new optimizer"):
        model.make_slots()
    model.compile("sgd")
    model.make_slots()


# --- Goyal et al. 2017


@pytest.fixture(scope="module")
def facebook_1h():
    """The recipe at batch 8192, which one device holds as weights if not as images."""
    path = RECIPES / "facebook_1h_8k.flags"
    return build_model(Config.from_flagfile(path, strategy="one_device", **SYNTHETIC))


def test_length(facebook_1h):
    assert facebook_1h.steps_per_epoch == 156
    assert facebook_1h.epochs == 90
    assert sum(v.shape.num_elements() for v in facebook_1h.trainable_variables) == 25_557_032


@pytest.mark.parametrize(
    ("epoch", "rate"),
    [
        (0, 0.1),
        (2.5, 1.65),
        (5, 3.2),
        (29, 3.2),
        (30, 0.32),
        (59, 0.32),
        (60, 0.032),
        (79, 0.032),
        (80, 0.0032),
        (89, 0.0032),
    ],
)
def test_learning_rate_by_epoch(facebook_1h, epoch, rate):
    config = Config.from_flagfile(RECIPES / "facebook_1h_8k.flags")
    schedule = build_schedule(config, steps_per_epoch=156)
    assert float(schedule(round(epoch * 156))) == pytest.approx(rate, rel=1e-6)
    # The optimizer has the same one.
    facebook_1h.optimizer.iterations.assign(round(epoch * 156))
    if KERAS_2:
        facebook_1h.optimizer._compute_current_learning_rate()
    assert float(facebook_1h.optimizer.learning_rate) == pytest.approx(rate, rel=1e-6)
    facebook_1h.optimizer.iterations.assign(0)


def test_warmup_grows_by_the_step():
    config = Config.from_flagfile(RECIPES / "facebook_1h_8k.flags")
    schedule = build_schedule(config, steps_per_epoch=156)
    for first in (0, 390, 760):
        rates = np.array([float(schedule(step)) for step in range(first, first + 21)])
        np.testing.assert_allclose(np.diff(rates), 3.1 / 780, rtol=1e-3)
    assert float(schedule(780)) == float(schedule(781))


def test_one_server_has_no_warmup():
    config = Config.from_flagfile(RECIPES / "facebook_1h_256.flags")
    schedule = build_schedule(config, steps_per_epoch=5004)
    for step in (0, 1, 5004, 30 * 5004 - 1):
        assert float(schedule(step)) == pytest.approx(0.1, rel=1e-7)
    assert float(schedule(30 * 5004)) == pytest.approx(0.01, rel=1e-6)


def test_momentum_and_decay(facebook_1h):
    optimizer = facebook_1h.optimizer
    assert type(optimizer) is SGD
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
    assert optimizer.l2_weight_decay == 1e-4
    variables = facebook_1h.trainable_variables
    decayed = [v for v, mask in zip(variables, optimizer.weight_decay_mask) if mask]
    # All but gamma and beta: convolutions, fc, and fc's bias, "except" for which the paper has no
    # word.
    assert sum(v.shape.num_elements() for v in decayed) == 25_502_912 + 1000
    norms = {id(v) for layer in batch_norms(facebook_1h) for v in (layer.gamma, layer.beta)}
    assert not norms & {id(v) for v in decayed}
    assert len(decayed) + len(norms) == len(variables) == 161


def test_initialization(facebook_1h):
    norms = batch_norms(facebook_1h)
    assert len(norms) == 53
    assert {(layer.momentum, layer.epsilon) for layer in norms} == {(0.9, 1e-5)}
    zero = [layer for layer in norms if not layer.gamma.numpy().any()]
    assert len(zero) == 16  # the last one of each block
    assert all(layer.name.endswith("_bn3") for layer in zero)
    assert all((layer.gamma.numpy() == 1).all() for layer in norms if layer not in zero)
    assert not any(layer.beta.numpy().any() for layer in norms)
    kernel, bias = facebook_1h.trainable_variables[-2:]
    assert kernel.shape == (2048, 1000)
    assert kernel.numpy().std() == pytest.approx(0.01, rel=0.01)
    assert abs(kernel.numpy().mean()) < 1e-4
    assert not bias.numpy().any()


# --- Seeds


@pytest.mark.long
def test_the_seed_decides_the_weights():
    one, same, other = (build_model(SMALL.replace(seed=seed)).get_weights() for seed in (3, 3, 4))
    for a, b in zip(one, same):
        np.testing.assert_array_equal(a, b)
    different = [a.shape for a, b in zip(one, other) if (a != b).any()]
    assert len(different) == 8  # convolutions (7) and the classifier


# --- Options


def test_options_reach_the_model():
    model = build_model(
        SMALL.replace(batch_norm_momentum=0.5, batch_norm_epsilon=1e-3, zero_gamma=False)
    )
    norms = batch_norms(model)
    assert len(norms) == 7
    assert {(layer.momentum, layer.epsilon) for layer in norms} == {(0.5, 1e-3)}
    assert all((layer.gamma.numpy() == 1).all() for layer in norms)
    model = build_model(SMALL.replace(model="resnet18", stem="small"))
    assert not any(isinstance(layer, keras.layers.MaxPooling2D) for layer in layers_in(model))


def test_training_options_reach_the_classifier():
    config = SMALL.replace(label_smoothing=0.1, accumulation_steps=4)
    model = build_model(config)
    assert (model.label_smoothing, model.accumulation_steps) == (0.1, 4)
    assert model.config == config.replace(replicas=(1, 1))
    assert model.labels == tuple(map(str, range(10)))
    assert model.name == "resnet8"


@pytest.mark.parametrize(
    ("duration", "epochs", "steps"),
    [
        ("3 epochs", 3, 120_108),
        ("1 step", 1, 1),
        ("40036 steps", 1, 40_036),
        ("80072 steps", 2, 80_072),
        ("2562334 examples", 2, 80_073),
    ],
)
def test_epochs_of_a_notebooks_fit(duration, epochs, steps):
    model = build_model(SMALL.replace(duration=duration))
    assert (model.steps_per_epoch, model.epochs) == (1_281_167 // 32, epochs)
    assert model.total_steps == steps


def test_needs_data():
    with pytest.raises(UserError, match="no data: give --data_dir"):
        build_model(Config(model="resnet8"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adm"}, "adm"),
        ({"optimizer": "adam", "momentum": 0.8}, "optimizer=adam has no momentum: leave it out"),
        ({"strategy": "auto", "fusion_segments": "1000"}, "1000"),
        (
            {"whitening": False, "initial_weights": "nowhere"},
            "initial_weights: nowhere does not exist",
        ),
    ],
)
def test_errors_come_before_images_are_read(digits, monkeypatch, changes, message):
    for name in ("whiten", "make_images_on_device"):
        monkeypatch.setattr(
            f"imagenet_fast.training.build.model.{name}", lambda *_: pytest.fail("read")
        )
    config = SMALL.replace(
        synthetic=False, data_dir=digits, data_on_device=True, model="resnet9", width=4
    )
    with pytest.raises(UserError, match=message):
        build_model(config.replace(**{"whitening": True, **changes}))


def test_dense_layers_need_images_of_one_size():
    config = SMALL.replace(model="alexnet_bn", image_size=64, eval_image_size=96)
    with pytest.raises(UserError, match=r"alexnet_bn: .*, size_ramp and eval_image_size"):
        build_classifier(config, "ab")


# --- Precision


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("float32", marks=pytest.mark.long),
        "mixed_bfloat16",
        pytest.param("mixed_float16", marks=pytest.mark.long),
    ],
)
def test_precision(precision):
    model = build_model(SMALL.replace(precision=precision))
    compute = {"float32": tf.float32, "mixed_bfloat16": tf.bfloat16, "mixed_float16": tf.float16}
    images = tf.zeros([2, 16, 16, 3], tf.uint8)
    assert model.input_shape == (None, 16, 16, 3)
    logits = model(images, training=True)
    assert (logits.dtype, logits.shape) == (tf.float32, (2, 10))
    # Weights, and the moving averages of batch norm.
    assert {tf.as_dtype(variable.dtype) for variable in model.variables} == {tf.float32}
    convolutions = [v for v in layers_in(model) if isinstance(v, keras.layers.Conv2D)]
    assert {tf.as_dtype(layer.output.dtype) for layer in convolutions} == {compute[precision]}
    assert {tf.as_dtype(layer.output.dtype) for layer in batch_norms(model)} == {compute[precision]}
    # Layers made afterwards are not affected.
    assert keras.mixed_precision.global_policy().name == "float32"


def test_an_error_restores_the_precision():
    with pytest.raises(UserError, match="images of 8 x 8 pixels are too small"):
        build_classifier(Config(model="alexnet_bn", image_size=8, precision="mixed_float16"), "ab")
    assert keras.mixed_precision.global_policy().name == "float32"


def test_loss_scale():
    for precision, scale, expected in (
        ("mixed_float16", 128.0, 128.0),
        ("mixed_float16", 0.0, 2.0**15),  # at first
        ("mixed_bfloat16", 0.0, 1.0),
    ):
        optimizer = build_model(SMALL.replace(precision=precision, loss_scale=scale)).optimizer
        assert float(scaled_loss(optimizer, tf.constant(1.0))) == expected
        assert type(unwrapped(optimizer)) is SGD


@pytest.mark.parametrize(
    "strategy", ["one_device", pytest.param("mirrored", marks=pytest.mark.long)]
)
def test_head_learning_rate_is_for_its_kernel_only(strategy):
    """Not of gammas."""
    options = {"optimizer": "muon", "muon_head_rate_factor": 7.0, "bias_rate_factor": 3.0}
    model = build_model(SMALL.replace(strategy=strategy, **options))
    found = {
        name_of(variable): factor
        for variable, factor in zip(model.trainable_variables, model.optimizer.rate_factors)
    }
    assert found.pop("logits/kernel") == 7.0
    for name, factor in found.items():
        assert factor == (3.0 if name.endswith(("bias", "beta")) else 1.0)


def test_muon_leaves_depthwise_kernels_to_sgd():
    """They have a row for each channel, but no output channels."""

    def make(num_classes, image_shape):
        x = images = keras.Input(image_shape)
        for layer in (keras.layers.Conv2D, keras.layers.SeparableConv2D):
            x = layer(4, 3)(x)
        x = keras.layers.GlobalAveragePooling2D()(keras.layers.DepthwiseConv2D(3)(x))
        return keras.Model(images, keras.layers.Dense(num_classes)(x))

    model = build_model(SMALL.replace(optimizer="muon"), model=make)
    variables = model.trainable_variables
    kernels = [i for i, variable in enumerate(variables) if variable.shape.rank == 4]
    depthwise = [i for i in kernels if "depthwise" in name_of(variables[i])]
    mask = model.optimizer.filter_mask
    assert (len(depthwise), len(kernels)) == (2, 4)
    assert [i for i, own in enumerate(mask) if own] == sorted({*kernels} - {*depthwise})


@pytest.mark.long
def test_a_saved_model_is_its_network(tmp_path):
    model = build_model(SMALL.replace(precision="mixed_bfloat16", optimizer="lars"))
    model.make_slots()
    model.save(tmp_path / "model.keras")
    network = models.load(tmp_path / "model.keras")
    assert getattr(network, "optimizer", None) is None
    images = np.random.default_rng(0).integers(0, 256, (2, *model.input_shape[1:]), np.uint8)
    np.testing.assert_array_equal(network(images), model(images))


# --- What strategies refuse


@pytest.mark.parametrize("name", ["OneDevice", "Mirrored", "CentralStorage", "Pipeline", "none"])
def test_loss_scaling_is_refused_where_keras_2_refuses_it(name, monkeypatch):
    """With any Keras, before a model is made."""
    strategy = {
        "OneDevice": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "Mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
        "CentralStorage": tf.distribute.experimental.CentralStorageStrategy,
        "Pipeline": PipelineStrategy,
        "none": tf.distribute.get_strategy,
    }[name]()
    made = []
    monkeypatch.setattr(build, "_build_without_optimizer", lambda *_: made.append(1) or 1 / 0)
    supported = name not in ("CentralStorage", "Pipeline")
    config = SMALL.replace(precision="mixed_float16")
    what = "pipelines" if name == "Pipeline" else "CentralStorageStrategy"
    refusal = pytest.raises(UserError, match=f"mixed_float16 is not for {what}.*mixed_bfloat16")
    with pytest.raises(ZeroDivisionError) if supported else refusal:
        build_model(config, strategy)
    assert len(made) == supported
    with pytest.raises(ZeroDivisionError):
        build_model(config.replace(precision="mixed_bfloat16"), strategy)


def test_mixed_float16_with_a_pipeline():
    options = {"pipeline_stages": 2, "accumulation_steps": 2, "strategy": "auto"}
    with pytest.raises(UserError, match="precision=mixed_float16 is not for pipelines"):
        build_model(SMALL.replace(precision="mixed_float16", **options))


def test_evaluation_has_a_stage_on_each_device(monkeypatch, capsys):
    """Of a run that had more devices, with two stages on each."""
    devices = "imagenet_fast.training.build.network.available_devices"
    config = SMALL.replace(
        accumulation_steps=4,
        pipeline_stages=8,
        pipeline_schedule="interleaved_1f1b",
        pipeline_stages_per_device=2,
        pipeline_balance=(1, 1, 1, 1, 1, 1, 1, 4),
    )
    monkeypatch.setattr(devices, lambda *_, **__: ["CPU:0"] * 4)
    assert with_stages_for_devices(config) == config
    monkeypatch.setattr(devices, lambda *_, **__: ["CPU:0"] * 3)
    fewer = SMALL.replace(accumulation_steps=4, pipeline_stages=3)
    assert with_stages_for_devices(config) == fewer
    told = "pipeline_stages=8 needs 4 devices, but there are 3, which get a stage each"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("images", "correction"), [(8, False), (4, True)])
def test_a_group_of_replicas_on_one_device_has_the_variances_of_several(images, correction):
    """The moving variance is of biased ones, as GroupedBatchNormalization's, not as of a replica.

    Two logical replicas of four images: a group, or on their own.
    """
    config = SMALL.replace(batch_size=8, replicas=(2,), batch_norm_batch_size=images)
    model = build_model(config)
    inputs = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8)
    (norm,) = (layer for layer in batch_norms(model) if layer.name == "stem_bn")
    network = models.network_of(model)
    pixels = model.get_layer("normalize")(inputs)
    convolved = keras.Model(network.inputs, norm.input)(pixels).numpy()
    convolved = convolved.reshape(8 // images, -1, convolved.shape[-1])
    variance = convolved.var(axis=1, ddof=int(correction)).mean(axis=0)
    momentum = config.batch_norm_momentum
    batch = tf.constant(inputs), tf.zeros(8, tf.int32)
    model.distribute_strategy.run(model.gradients, args=(batch,))
    expected = momentum + (1 - momentum) * variance
    np.testing.assert_allclose(norm.moving_variance.numpy(), expected, rtol=2e-6)


def test_one_class_gives_a_warning(capsys):
    warn_once.cache_clear()
    build_model(Config(model="resnet9", width=4, image_size=32, synthetic=True, num_classes=1))
    assert "there is only one class" in capsys.readouterr().err
