"""GPipe as a Keras model: what it computes is what the same blocks compute as a plain model."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import Dropout
from imagenet_fast.optimizers import LARS
from imagenet_fast.optimizers.weight_average import WeightAverage
from imagenet_fast.pipeline_parallel.gpipe import GPipe

EXAMPLES, CLASSES = 50, 3
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(EXAMPLES, 8, 8, 3)).astype("float32")
LABELS = np.arange(EXAMPLES) % CLASSES
WEIGHTS = np.linspace(0, 2, EXAMPLES, dtype="float32")
# Several names of the one device that a process has.
DEVICES = ["CPU:0"] * 4
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def conv(number, regularizer=None):
    return keras.layers.Conv2D(
        4, 3, activation="tanh", kernel_regularizer=regularizer, name=f"conv{number}"
    )


def blocks(regularizer=None):
    keras.utils.set_random_seed(1)
    head = [keras.layers.Flatten(), keras.layers.Dense(CLASSES, name="logits")]
    return [*(conv(number, regularizer) for number in range(3)), keras.Sequential(head)]


def plain(layers):
    outputs = inputs = keras.Input(IMAGES.shape[1:])
    for layer in layers:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def trained(model, optimizer="sgd", loss=SPARSE, labels=LABELS, **options):
    """Trains, with a last batch that is shorter; returns what fit and evaluate say."""
    # A plain model eagerly, because tracing takes longer than its few steps.
    eagerly = not isinstance(model, GPipe)
    model.compile(optimizer, loss, metrics=["mae"], run_eagerly=eagerly)
    if model.built:  # Else fit would trace a plain model's step again, with these variables.
        model.optimizer.build(model.trainable_variables)
    history = model.fit(
        IMAGES, labels, batch_size=13, epochs=2, shuffle=False, verbose=0, **options
    ).history
    evaluated = model.evaluate(IMAGES, labels, batch_size=EXAMPLES, verbose=0, **options)
    return [*history["loss"], *history["mae"], *evaluated]


@functools.cache
def trained_plain():
    """What the plain model says, and predicts then."""
    return trained_and_predicted(plain(blocks()))


def trained_and_predicted(model):
    return trained(model), model.predict(IMAGES, batch_size=EXAMPLES, verbose=0)


@pytest.mark.parametrize(
    ("stages", "parts", "options", "rematerialize"),
    [
        pytest.param(1, 1, {}, "except_last", marks=pytest.mark.long),
        pytest.param(2, 3, {}, "always", marks=pytest.mark.long),
        (3, 12, {"unroll": False}, "except_last"),
        pytest.param(2, 3, {"schedule": "1f1b"}, "never", marks=pytest.mark.long),
        pytest.param(4, 11, {"schedule": "1f1b"}, "never", marks=pytest.mark.long),
        pytest.param(
            2,
            3,
            {"schedule": "interleaved_1f1b", "num_stages": 4},
            "always",
            marks=pytest.mark.long,
        ),
    ],
)
def test_fit_evaluate_and_predict_are_those_of_the_plain_model(
    stages, parts, options, rematerialize
):
    pipeline = GPipe(
        blocks(),
        DEVICES[:stages],
        num_micro_batches=parts,
        rematerialize=rematerialize,
        **options,
    )
    for own, other in zip(trained_and_predicted(pipeline), trained_plain()):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def one_hot(labels):
    return np.eye(CLASSES, dtype="float32")[labels]


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        pytest.param("mse", None, id="by name"),
        pytest.param("mse", WEIGHTS, id="by name, weighted"),
        pytest.param(
            lambda labels, outputs: tf.abs(labels - outputs), WEIGHTS, id="function, weighted"
        ),
        pytest.param(keras.losses.MeanSquaredError(reduction="sum"), None, id="sum"),
        pytest.param(keras.losses.MeanSquaredError(reduction="sum"), WEIGHTS, id="sum, weighted"),
    ],
)
def test_losses_count_as_in_the_plain_model(loss, weights):
    options = {"loss": loss, "labels": one_hot(LABELS), "sample_weight": weights}
    own = trained(
        GPipe(blocks(), DEVICES[:2], num_micro_batches=3), keras.optimizers.SGD(1e-3), **options
    )
    np.testing.assert_allclose(
        own, trained(plain(blocks()), keras.optimizers.SGD(1e-3), **options), rtol=1e-5, atol=1e-6
    )


# In the default run, test_losses.py and test_pipeline_stages.py have regularized layers.
@pytest.mark.long
def test_regularization_counts_once_a_batch():
    make = lambda: blocks(keras.regularizers.L2(0.1))  # noqa: E731
    own = trained(GPipe(make(), DEVICES[:2], num_micro_batches=3))
    np.testing.assert_allclose(own, trained(plain(make())), rtol=1e-5, atol=1e-6)
    assert own[0] > 1.5 * trained_plain()[0][0]


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.Adam(1e-3, global_clipnorm=0.1), id="clipped Adam"),
        pytest.param(lambda: LARS(0.1, momentum=0.9, weight_decay=1e-3), id="LARS"),
        pytest.param(
            lambda: keras.mixed_precision.LossScaleOptimizer(
                keras.optimizers.SGD(0.01), dynamic=False, initial_scale=1024
            ),
            id="loss scale",
        ),
    ],
)
def test_optimizers_take_the_same_steps(optimizer):
    own = trained(GPipe(blocks(), DEVICES[:3], num_micro_batches=4), optimizer())
    np.testing.assert_allclose(own, trained(plain(blocks()), optimizer()), rtol=1e-4, atol=1e-5)


def test_updates_are_not_compiled():
    """As Keras would have it on GPUs, where it fails if the variables are on several of them."""
    optimizer = keras.optimizers.SGD(jit_compile=True)
    GPipe(blocks(), devices=DEVICES[:2], num_micro_batches=2).compile(optimizer, SPARSE)
    assert not optimizer.jit_compile


@pytest.mark.long
@pytest.mark.parametrize("built", [False, True])
def test_fit_traces_a_step_once(monkeypatch, built):
    model, traced = GPipe(blocks(), DEVICES[:2], num_micro_batches=2), []
    if built:
        model.build_on(IMAGES)
    compute = model.pipeline.compute
    monkeypatch.setattr(model.pipeline, "compute", lambda *args: traced.append(1) or compute(*args))
    model.compile("adam", SPARSE)
    for _ in range(2):
        model.fit(IMAGES, LABELS, batch_size=25, verbose=0)
    assert len(traced) == 1


@pytest.mark.long
def test_mixed_precision():
    def make():
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
        try:
            return blocks()
        finally:
            keras.mixed_precision.set_global_policy("float32")

    pipeline = GPipe(make(), DEVICES[:2], num_micro_batches=3)
    own, other = trained(pipeline), trained(plain(make()))
    np.testing.assert_allclose(own, other, rtol=0.02, atol=0.02)
    assert {variable.dtype for variable in pipeline.variables} == {tf.float32}


def test_weights_can_be_averaged():
    model = GPipe(blocks(), DEVICES[:2], num_micro_batches=2)
    model.build_on(IMAGES)
    before = [weight.numpy() for weight in model.trainable_variables]
    average = WeightAverage(model.trainable_variables, decay=0.75)
    model.compile("sgd", SPARSE)
    fit(model)
    average.update()
    after = [weight.numpy() for weight in model.trainable_variables]
    with average.in_use():
        for own, first, last in zip(model.trainable_variables, before, after):
            np.testing.assert_allclose(own, 0.75 * first + 0.25 * last, rtol=1e-5, atol=1e-6)


def noisy_blocks(count=4):
    """With batch norm and dropout, whose states a checkpoint must hold."""
    made = []
    for block in blocks()[: count - 1]:
        layers = [block, keras.layers.BatchNormalization(), Dropout(0.3)]
        made.append(keras.Sequential(layers))
    return [*made, blocks()[3]]


def noisy_model(balance, rematerialize):
    model = GPipe(
        noisy_blocks(sum(balance)),
        DEVICES[: len(balance)],
        balance=balance,
        num_micro_batches=3,
        rematerialize=rematerialize,
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), SPARSE)
    return model


def fit(model):
    model.fit(IMAGES, LABELS, batch_size=25, shuffle=False, verbose=0)


@pytest.mark.long
def test_a_checkpoint_goes_on_in_another_balance(tmp_path):
    first = noisy_model([1, 3], "always")
    fit(first)
    path = tf.train.Checkpoint(model=first).save(str(tmp_path / "checkpoint"))
    fit(first)

    second = noisy_model([2, 1, 1], "never")
    second.build_on(IMAGES)
    second.optimizer.build(second.trainable_variables)
    tf.train.Checkpoint(model=second).restore(path).assert_existing_objects_matched()
    fit(second)
    for own, other in zip(second.weights, first.weights):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)


def test_batch_norm_moves_once_a_batch_by_the_statistics_of_all_of_it():
    norm = keras.layers.BatchNormalization(momentum=0.9)
    head = [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    model = GPipe([norm, keras.Sequential(head)], DEVICES[:2], num_micro_batches=4)
    model.compile("sgd", SPARSE)
    model.train_on_batch(IMAGES, LABELS)
    count = IMAGES[..., 0].size
    np.testing.assert_allclose(norm.moving_mean, 0.1 * IMAGES.mean((0, 1, 2)), atol=1e-6)
    # Keras' fused kernel divides by one fewer.
    variance = IMAGES.var((0, 1, 2)) * count / (count - 1)
    np.testing.assert_allclose(norm.moving_variance, 0.9 + 0.1 * variance, rtol=1e-5)


def test_a_saved_model_has_no_pipeline(tmp_path):
    model = GPipe(noisy_blocks(2), DEVICES[:2], num_micro_batches=5)
    expected = model.predict(IMAGES[:7], verbose=0)
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(loaded(IMAGES[:7], training=False), expected, rtol=1e-5, atol=1e-6)


def test_default_devices_are_those_of_this_machine():
    model = GPipe(blocks(), num_micro_batches=2)
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    assert [stage.device for stage in model.pipeline.stages] == [own.name for own in devices]


@pytest.mark.parametrize(
    ("loss", "message"),
    [(None, "no loss to train with"), (["mse", "mse"], "given 2 losses, but the outputs are 1")],
)
def test_losses_that_do_not_match_the_outputs(loss, message):
    model = GPipe(blocks(), DEVICES[:2])
    model.compile("sgd", loss)
    with pytest.raises(UserError, match=message):
        model.train_on_batch(IMAGES, LABELS)


def test_a_loss_of_each_example_is_refused():
    model = GPipe(blocks(), DEVICES[:2])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="none"))
    with pytest.raises(UserError, match=r"has reduction='none'.* leave reduction out"):
        model.train_on_batch(IMAGES, one_hot(LABELS))


@pytest.mark.long
def test_a_loss_of_each_example_trains_a_plain_model_as_their_sum():
    """What the refusal of such a loss says."""
    summed, each = (plain(blocks()) for _ in range(2))
    for model, reduction in ((summed, "sum"), (each, "none")):
        model.compile(
            keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError(reduction=reduction)
        )
        model.train_on_batch(IMAGES, one_hot(LABELS), sample_weight=WEIGHTS)
    for own, other in zip(each.get_weights(), summed.get_weights()):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)


def test_the_step_is_not_compiled():
    model = GPipe(blocks(), DEVICES[:2])
    with pytest.raises(UserError, match="leave jit_compile out"):
        model.compile("sgd", SPARSE, jit_compile=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rematerialize": "allways"}, "rematerialize='allways' does not exist; did you mean"),
        ({"schedule": "pipe"}, "schedule='pipe' does not exist; did you mean 'gpipe'"),
        ({"schedule": "1f1b", "unroll": False}, "1f1b has no graph with loops"),
        ({"num_micro_batches": 2.5}, "num_micro_batches is 2.5, but must be an integer"),
        ({"num_stages": "2"}, "num_stages is '2', but must be an integer"),
        ({"batch_size": -3}, "batch_size is -3, but must be positive"),
        ({"device_memory_gb": "8"}, "device_memory_gb is '8', but must be a positive number"),
        ({"device_memory_gb": float("nan")}, "device_memory_gb is nan, but must be a positive"),
        ({"device_memory_gb": 0}, "device_memory_gb is 0, but must be a positive number"),
        ({"optimizer_slots": "adam"}, "optimizer_slots is 'adam', but must be a number"),
        ({"optimizer_slots": -1}, "optimizer_slots is -1, but must be a number, not negative"),
        ({"devices": []}, r"devices is \[\], but must be a list, as"),
        ({"devices": "CPU:0"}, "devices is 'CPU:0', but must be a list, as"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"balance": [1, 2]}, "balance \\[1, 2\\] is of 3 blocks, but there are 4"),
        ({"balance": [1, 2, 1]}, "balance \\[1, 2, 1\\] has 3 stages, but there are 2"),
        ({"balance": [4, 0]}, "leaves a stage without blocks"),
        ({"balance": [1.5, 2.5]}, r"balance is \[1.5, 2.5\], but must be a list"),
        ({"balance": "22"}, "balance is '22', but must be a list"),
        ({"balance": 4}, "balance is 4, but must be a list"),
        ({"rematerialize": True}, "rematerialize=True does not exist; choose from always, except"),
        ({"num_stages": 3}, "num_stages is 3, but there are 2 devices: .*interleaved_1f1b"),
        ({"schedule": "interleaved_1f1b"}, "num_stages is 2 and the number of devices 2: give num"),
        ({"schedule": "interleaved_1f1b", "num_stages": 3}, "num_stages is 3 .* devices 2"),
        ({"costs": "time"}, "costs='time' does not exist"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        GPipe(blocks(), **{"devices": DEVICES[:2], **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rematerialize": "allways"}, "rematerialize='allways' does not exist; did you mean"),
        ({"num_micro_batches": "4"}, "num_micro_batches is '4', but must be an integer"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0, but must be positive"),
    ],
)
def test_bad_options_beside_a_functional_model(options, message):
    images = keras.Input(4)
    model = keras.Model(images, keras.layers.Dense(2)(keras.layers.Dense(3)(images)))
    with pytest.raises(UserError, match=message):
        GPipe(model, DEVICES[:2], **options)


def test_layers_and_models_of_another_keras_package_are_refused():
    """By a stand-in, because importing that package changes what tf_keras 2.15 loads from files."""
    layer = type("Dense", (), {"__module__": "keras.src.layers.core.dense"})
    model = type("Sequential", (), {"__module__": "keras.src.models", "__call__": print})
    for blocks_ in ([layer(), layer()], model()):
        with pytest.raises(UserError, match=r"is of the package keras.* make it with tf_keras"):
            GPipe(blocks_, DEVICES[:2])


@pytest.mark.parametrize("first", ["predict", "evaluate", "call", "fit"])
def test_weights_that_stages_share_are_refused_whatever_comes_first(first):
    shared = keras.layers.Dense(CLASSES, name="shared")
    head = keras.Sequential([shared])
    model = GPipe(
        [keras.layers.Flatten(), keras.layers.Dense(CLASSES), shared, head],
        DEVICES[:2],
        balance=[3, 1],
    )
    model.compile("sgd", SPARSE)
    call = {
        "predict": lambda: model.predict(IMAGES, verbose=0),
        "evaluate": lambda: model.evaluate(IMAGES, LABELS, verbose=0),
        "call": lambda: model(IMAGES),
        "fit": lambda: model.fit(IMAGES, LABELS, verbose=0),
    }[first]
    with pytest.raises(UserError, match="shared/kernel:0 is shared by blocks of stages 0 and 1"):
        call()


def test_a_sequential_and_lists_stand_for_blocks():
    whole = GPipe(keras.Sequential(blocks()), DEVICES[:2])
    assert [block.name for block in whole.blocks[:3]] == ["conv0", "conv1", "conv2"]
    first, *rest = blocks()
    nested = GPipe([[first, rest[0]], *rest[1:]], DEVICES[:2])
    assert len(nested.blocks) == 3
    nested(IMAGES)
    whole(IMAGES)
    whole.set_weights(nested.get_weights())
    np.testing.assert_allclose(whole(IMAGES), nested(IMAGES), rtol=1e-6)


@pytest.fixture(scope="module")
def model_and_predictions():
    """A trained model of three blocks, and what it predicts."""
    model = noisy_model([2, 1], "except_last")
    fit(model)
    return model, model.predict(IMAGES, verbose=0)


@pytest.mark.long
def test_a_saved_model_predicts(model_and_predictions, tmp_path):
    model, expected = model_and_predictions
    model.save(tmp_path / "saved")
    loaded = keras.models.load_model(tmp_path / "saved")
    np.testing.assert_allclose(loaded.predict(IMAGES, verbose=0), expected, rtol=1e-5)


@pytest.mark.long
def test_a_keras_file_is_loaded_on_one_device(model_and_predictions, tmp_path):
    model, expected = model_and_predictions
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert len(loaded.pipeline.stages) == 1
    np.testing.assert_allclose(loaded.predict(IMAGES, verbose=0), expected, rtol=1e-5)
    # The optimizer goes on from where it was, too.
    for variable, other in zip(loaded.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(variable, other)
    fit(loaded)
    assert not np.allclose(loaded.predict(IMAGES, verbose=0), expected)


@pytest.mark.long
def test_weights_are_saved_and_loaded(model_and_predictions, tmp_path):
    model, expected = model_and_predictions
    model.save_weights(tmp_path / "w.weights.h5")
    other = noisy_model([1, 1, 1], "never")
    other.build_on(IMAGES)
    other.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_allclose(other.predict(IMAGES, verbose=0), expected, rtol=1e-5)


def test_a_clone_is_on_one_device(model_and_predictions):
    model, expected = model_and_predictions
    clone = keras.models.clone_model(model)
    assert clone.get_config().keys() == model.get_config().keys()
    assert clone.pipeline.num_micro_batches == 3
    assert len(clone.pipeline.stages) == 1
    clone.build_on(IMAGES)
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(clone.predict(IMAGES, verbose=0), expected, rtol=1e-5)


def test_a_clone_of_interleaved_stages():
    model = GPipe(blocks(), DEVICES[:2], num_stages=4, schedule="interleaved_1f1b")
    assert keras.models.clone_model(model).pipeline.schedule == "1f1b"


# In the default run, a pipeline is saved as the model without one, above.
@pytest.mark.long
def test_a_model_checkpoint(tmp_path):
    model = noisy_model([2, 2], "except_last")
    callback = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="loss")
    model.fit(IMAGES, LABELS, batch_size=25, verbose=0, callbacks=[callback])
    loaded = keras.models.load_model(tmp_path / "best.keras")
    np.testing.assert_allclose(loaded(IMAGES), model(IMAGES), rtol=1e-5)


def test_a_block_that_occurs_twice_is_saved_once(tmp_path):
    keras.utils.set_random_seed(1)
    shared, values = keras.layers.Dense(3, "tanh"), IMAGES[0, 0]
    model = GPipe([shared, keras.layers.ReLU(), shared, keras.layers.Dense(2)], DEVICES[:1])
    expected = model(values)
    model.save(tmp_path / "model.keras")
    for copy in (
        keras.models.clone_model(model),
        keras.models.load_model(tmp_path / "model.keras"),
    ):
        copy.build_on(values)
        assert copy.blocks[0] is copy.blocks[2]
        assert len(copy.weights) == len(model.weights) == 4
        copy.set_weights(model.get_weights())
        np.testing.assert_allclose(copy(values), expected, rtol=1e-6)


def test_configurations_without_an_order_of_blocks():
    """Those of earlier versions."""
    config = GPipe([keras.layers.Dense(3), keras.layers.ReLU()], DEVICES[:1]).get_config()
    assert config.pop("order") == [0, 1]
    assert [type(block).__name__ for block in GPipe.from_config(config).blocks] == ["Dense", "ReLU"]


def test_inputs_are_not_rounded_before_the_first_block():
    """As in keras.Sequential: each layer casts its inputs itself."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        first = keras.layers.Lambda(lambda x: x - 1000, dtype="float32")
        model = GPipe([first, keras.layers.Activation("linear", dtype="float32")], DEVICES[:2])
        np.testing.assert_array_equal(model(tf.constant([[1001.0]])), [[1.0]])
    finally:
        keras.mixed_precision.set_global_policy("float32")
