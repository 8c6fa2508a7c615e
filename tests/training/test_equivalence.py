"""One device = replicas = workers = micro-batches, wherever the mathematics says so."""

import functools
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence_job import with_batch_norm

from imagenet_fast import Config, build_model, make_dataset
from imagenet_fast.base.keras_2 import layers_in

pytestmark = pytest.mark.slow

JOB = pathlib.Path(__file__).with_name("equivalence_job.py")
BATCH_NORM_STEPS = 2
BATCH_NORM_RATE = 0.005
OPTIONS = {
    "image_size": 16,
    "train_crop": "pad",
    "batch_size": 32,
    "learning_rate": 0.05,
    "rate_scaling": "none",
    "warmup": "0 epochs",
    "decay_at": "15 steps",
    "weight_decay": 0.01,
    "label_smoothing": 0.1,
    "seed": 3,
}
EVALUATION_BATCHES = (64, 4096)
# Name -> (changed options, worker processes).
JOBS = {
    "one_device": ({"strategy": "one_device"}, 0),
    "micro_batches": ({"strategy": "one_device", "accumulation_steps": 4}, 0),
    "replicas": ({"strategy": "mirrored", "logical_cpus": 4}, 0),
    "replicas_and_micro_batches": (
        {"strategy": "mirrored", "logical_cpus": 2, "accumulation_steps": 2},
        0,
    ),
    "two_workers": ({"strategy": "multi_worker"}, 2),
    # Four logical replicas on one device, on two, and on two workers.
    "carried_by_one": ({"strategy": "one_device", "replicas": (4,)}, 0),
    "carried_by_two": ({"strategy": "mirrored", "logical_cpus": 2, "replicas": (4,)}, 0),
    "carried_by_workers": ({"strategy": "multi_worker", "replicas": (4,)}, 2),
}
# Replicas and micro-batches at once show what either would.
QUICK = ("one_device", "replicas_and_micro_batches", "carried_by_workers")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in JOBS]
OTHERS = [name for name in ALL if name.values != ("one_device",)]


@pytest.fixture(scope="module")
def results(digits, tmp_path_factory, run_python_session):
    """The outcome of each job, run when it is first asked for."""
    found = {}

    def get(name):
        if name not in found:
            changes, workers = JOBS[name]
            folder = tmp_path_factory.mktemp(name)
            job = {
                "config": {**OPTIONS, "data_dir": digits, **changes},
                # tests/training/test_evaluate.py has other batches.
                "evaluate": EVALUATION_BATCHES[:1] if name in QUICK else EVALUATION_BATCHES,
                "out": str(folder / "out.npz"),
            }
            (folder / "job.json").write_text(json.dumps(job))
            run_python_session([JOB, folder / "job.json"], workers=workers)
            found[name] = dict(np.load(folder / "out.npz"))
        return found[name]

    return get


def weights(result, prefix):
    """The arrays saved as PREFIX0, PREFIX1, ..."""
    count = sum(key.startswith(prefix) for key in result)
    return [result[f"{prefix}{i}"] for i in range(count)]


def assert_same_weights(one, other, tolerance):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["weight", "average"])
def test_same_weights_with_lars_and_clipping_and_an_average(results, name, kind):
    one, other = results("one_device"), results(name)
    assert_same_weights(weights(one, f"lars_{kind}"), weights(other, f"lars_{kind}"), 1e-5)
    pairs = zip(weights(one, f"lars_{kind}"), weights(one, "lars_initial"))
    assert min(np.abs(after - before).max() for after, before in pairs) > 0.001
    np.testing.assert_allclose(one["lars_loss"], other["lars_loss"], rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_each_image_is_evaluated_once(results, name):
    result, one = results(name), results("one_device")
    for batch in [batch for batch in EVALUATION_BATCHES if f"eval{batch}_top1" in result]:
        assert result[f"eval{batch}_examples"] == 359
        assert result[f"eval{batch}_skipped"] == 0
        assert result[f"eval{batch}_top1"] == one["eval64_top1"]
        assert result[f"eval{batch}_top5"] == one["eval64_top5"]
        np.testing.assert_allclose(result[f"eval{batch}_loss"], one["eval64_loss"], rtol=1e-5)


# With batch norm each part of the global batch has its own statistics: a replica takes consecutive
# images, and so do a micro-batch and a worker.
QUARTERS = tuple((8 * i, 8 * i + 8, None) for i in range(4))
# Name -> start, stop and step of each part.
PARTS = {
    "one_device": ((None, None, None),),
    "micro_batches": QUARTERS,
    "replicas": QUARTERS,
    "replicas_and_micro_batches": QUARTERS,
    "two_workers": tuple((16 * i, 16 * i + 16, None) for i in range(2)),
    **dict.fromkeys(("carried_by_one", "carried_by_two", "carried_by_workers"), QUARTERS),
}


@pytest.fixture(scope="module")
def expected(digits):
    """What is expected of parts, computed when it is first asked for."""
    return functools.cache(functools.partial(reference, digits))


@pytest.mark.parametrize("name", ALL)
def test_batch_norm_uses_the_statistics_of_each_part(results, expected, name):
    result = results(name)
    trained, moving = expected(PARTS[name])
    found = weights(result, "normed_weight")
    assert_same_weights(found, trained, 1e-5)
    assert_same_weights(weights(result, "normed_moving"), moving, 5e-5)


def test_statistics_of_parts_are_others_than_those_of_the_whole(expected):
    for name in ("replicas", "two_workers"):
        trained, whole = expected(PARTS[name])[0], expected(PARTS["one_device"])[0]
        assert max(np.abs(a - b).max() for a, b in zip(trained, whole)) > 1e-4


def reference(data_dir, parts):
    """Trains with plain Keras layers and NumPy, one part of each batch after another.

    Returns:
      The trainable weights, and the moving averages of batch norm, averaged over the parts, each
      of which has its own.
    """
    config = Config(data_dir=data_dir, strategy="one_device", **OPTIONS)
    rate = BATCH_NORM_RATE
    model = build_model(config, model=with_batch_norm)
    batches = iter(make_dataset(config, "train"))
    momentum = [np.zeros(v.shape, np.float32) for v in model.trainable_variables]
    decayed = [not keras_scale_or_shift(v, model) for v in model.trainable_variables]
    own = [[v.numpy() for v in model.non_trainable_variables] for _ in parts]
    for _ in range(BATCH_NORM_STEPS):
        images, labels, _ = next(batches)
        gradients = [np.zeros(v.shape, np.float32) for v in model.trainable_variables]
        for part, statistics in zip(parts, own):
            for variable, value in zip(model.non_trainable_variables, statistics):
                variable.assign(value)
            with tf.GradientTape() as tape:
                logits = model(images[slice(*part)], training=True)
                targets = 0.9 * tf.one_hot(labels[slice(*part)], 10) + 0.1 / 10
                losses = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
                loss = tf.reduce_sum(losses) / config.batch_size
            for total, gradient in zip(gradients, tape.gradient(loss, model.trainable_variables)):
                total += gradient.numpy()
            statistics[:] = [v.numpy() for v in model.non_trainable_variables]
        for i, variable in enumerate(model.trainable_variables):
            gradient = gradients[i] + (0.01 * variable.numpy() if decayed[i] else 0)
            momentum[i] = 0.9 * momentum[i] + gradient
            variable.assign_sub(rate * (gradient + 0.9 * momentum[i]))
    moving = [np.mean(values, axis=0) for values in zip(*own)]
    return [v.numpy() for v in model.trainable_variables], moving


def keras_scale_or_shift(variable, model):
    return any(
        variable is parameter
        for layer in layers_in(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        for parameter in (layer.gamma, layer.beta)
    )
