"""What a run tells, against numbers worked out by hand, with a clock that is told the time."""

import math
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.training.logs.clock import Clock
from imagenet_fast.training.logs.evaluations import Evaluations
from imagenet_fast.training.logs.logger import Logger
from imagenet_fast.training.logs.recorder import Recorder, check_evaluated
from imagenet_fast.training.step.classifier import Classifier

BATCH = 4
SECONDS_A_STEP = 2.0


class Time:
    """Passes while steps are taken, and faster while models are compiled and evaluated."""

    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


class Rows(Logger, list):
    """A logger that keeps the rows."""

    write = list.append


def make_model():
    """Its logits are its inputs, whatever it is taught."""
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(6, use_bias=False, kernel_initializer="identity")(inputs)
    model = Classifier(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0))
    return model


@pytest.fixture(scope="module")
def traced_once():
    return make_model()


@pytest.fixture
def model(traced_once):
    traced_once.reset_metrics()
    return traced_once


def make_data(steps, seed=0):
    """Logits, labels and weights, a row a step: [steps, BATCH, ...]."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(steps, BATCH, 6)).astype("float32")
    labels = generator.integers(0, 6, (steps, BATCH))
    return logits, labels, np.ones((steps, BATCH), "float32")


def run(
    model,
    data,
    epochs=1,
    validation=None,
    validated=0,
    every=3,
    per_call=1,
    first=0,
    recorder=None,
    **options,
):
    """Returns the recorder, its rows and its clock after some epochs over the same data.

    The first call of steps compiles.
    """
    if recorder is None:
        time, rows = Time(), Rows()
        clock = Clock(time)
        settings = types.SimpleNamespace(
            config=Config(batch_size=BATCH, **options),
            info=types.SimpleNamespace(multi_label=False),
            steps_per_epoch=10,
            examples={"validation": validated}.get,
        )
        recorder = Recorder(settings, model, clock, [rows], Evaluations(), step=first)
        recorder.rows, recorder.clock, recorder.time = rows, clock, time
    else:
        recorder.clock.compiling()
    compiles = True
    for _ in range(epochs):
        batches = list(zip(*data))
        while batches:
            step = recorder.step
            count = 1 if compiles else min(per_call, len(batches), every - step % every)
            if not compiles:
                recorder.clock.start()
            losses = [step_of(model, "train_function", batches.pop(0)) for _ in range(count)]
            recorder.time.now += 100 if compiles else count * SECONDS_A_STEP
            bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
            diverged = step + bad[0] + 1 if bad else None
            recorder.count(step + count, diverged, compiled=compiles)
            compiles = False
            if recorder.step % every == 0 or not batches:
                recorder.read()
        recorder.clock.stop()
        if validation:
            model.reset_metrics()
            for batch in zip(*validation):
                step_of(model, "test_function", batch)
                recorder.time.now += 1000
            recorder.evaluated(model.metric_sums.results())
        recorder.restart()
    return recorder


def step_of(model, function, batch):
    """Takes a step of training or evaluation and returns its loss."""
    getattr(model, f"make_{function}")()
    return float(getattr(model, function)(iter([batch]))["loss"])


def expected(data, steps):
    """Mean loss, top-1 and top-5 over the images of some steps."""
    logits, labels, weights = (part[list(steps)].reshape(-1, *part.shape[2:]) for part in data)
    logits, labels = logits[weights > 0].astype("float64"), labels[weights > 0]
    right = logits[np.arange(len(labels)), labels]
    losses = np.log(np.exp(logits).sum(1)) - right
    ranks = (logits > right[:, None]).sum(1)
    return losses.mean(), (ranks < 1).mean(), (ranks < 5).mean(), len(labels)


def assert_row(row, data, steps):
    loss, top1, top5, examples = expected(data, steps)
    assert row["loss"] == pytest.approx(loss, rel=1e-5)
    assert row["top1"] == pytest.approx(top1, abs=1e-6)
    assert row["top5"] == pytest.approx(top5, abs=1e-6)
    assert row["examples"] == examples


# --- Rows


def test_each_row_covers_the_steps_since_the_last_one(model):
    data = make_data(10)
    data[2][4, 1] = 0  # could not be read
    rows = run(model, data, max_bad_images=1).rows
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("train", step) for step in (3, 6, 9, 10)
    ]
    assert [row["epoch"] for row in rows] == [0.3, 0.6, 0.9, 1]
    assert [row["skipped"] for row in rows] == [0, 1, 0, 0]
    for row, steps in zip(rows, (range(3), range(3, 6), range(6, 9), [9])):
        assert_row(row, data, steps)
        assert row["learning_rate"] == 0


def test_rows_at_and_after_each_evaluation(model):
    data, validation = make_data(4), make_data(5, seed=1)
    recorder = run(model, data, epochs=2, validation=validation, validated=20)
    rows = recorder.rows
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("train", 3),
        ("train", 4),
        ("validation", 4),
        ("train", 6),
        ("train", 8),
        ("validation", 8),
    ]
    # Steps 5 and 6 are the first two of the second epoch.
    for row, steps in zip(rows, (range(3), [3], None, [0, 1], [2, 3])):
        if steps:
            assert_row(row, data, steps)
    for row in (rows[2], rows[5]):
        assert_row(row, validation, range(5))
        assert not row.keys() & {"learning_rate", "images_per_second"}
    assert recorder.evaluations.last == rows[5]


def test_nothing_is_lost_at_the_end_of_an_epoch_without_evaluation(model):
    data = make_data(4)
    rows = run(model, data, epochs=2).rows
    assert [row["step"] for row in rows] == [3, 4, 6, 8]
    assert sum(row["examples"] for row in rows) == 8 * BATCH
    for row, steps in zip(rows, (range(3), [3], [0, 1], [2, 3])):
        assert_row(row, data, steps)


def test_a_resumed_run_continues_counting(model):
    rows = run(model, make_data(4), first=17).rows
    assert [row["step"] for row in rows] == [18, 21]
    assert [row["epoch"] for row in rows] == [1.8, 2.1]
    assert [row["examples"] for row in rows] == [BATCH, 3 * BATCH]


# --- Times


def test_training_time_excludes_the_first_step(model):
    validation = make_data(5, seed=1)
    recorder = run(model, make_data(4), epochs=2, validation=validation, validated=20)
    clock = recorder.clock
    assert clock.compile_seconds == 100
    assert clock.train_seconds == 7 * SECONDS_A_STEP
    assert clock.timed_images == 7 * BATCH
    assert clock.wall_seconds == 100 + 7 * SECONDS_A_STEP + 10 * 1000
    told = [(row["step"], row["train_seconds"], row["wall_seconds"]) for row in recorder.rows]
    assert told == [
        (3, 4, 104),
        (4, 6, 106),
        (4, 6, 5106),
        (6, 10, 5110),
        (8, 14, 5114),
        (8, 14, 10114),
    ]
    speeds = [row["images_per_second"] for row in recorder.rows if row["kind"] == "train"]
    assert speeds == [BATCH / SECONDS_A_STEP] * 4


def test_training_time_excludes_compiling_another_program(model):
    recorder = run(model, make_data(4))
    clock = recorder.clock
    assert (clock.compile_seconds, clock.train_seconds) == (100, 3 * SECONDS_A_STEP)
    run(model, make_data(4), recorder=recorder)
    assert (clock.compile_seconds, clock.train_seconds) == (200, 6 * SECONDS_A_STEP)
    assert clock.timed_images == 6 * BATCH
    speeds = [row["images_per_second"] for row in recorder.rows]
    assert speeds == [BATCH / SECONDS_A_STEP] * 4


def test_steps_that_compile_between_two_rows_are_not_timed(model):
    recorder = run(model, make_data(1), every=2)
    for step in (2, 3):
        recorder.clock.compiling()
        recorder.count(step, compiled=True)
    recorder.read()
    assert recorder.clock.timed_images == 0


def test_speed_before_the_first_timed_step(model):
    rows = run(model, make_data(2), every=1).rows
    assert [row["images_per_second"] for row in rows] == [0, BATCH / SECONDS_A_STEP]


# --- What stops a run


@pytest.mark.parametrize(
    ("per_call", "value", "start"), [(4, math.nan, 100), (1, math.inf, 0), (20, math.nan, 0)]
)
def test_divergence_names_its_step(per_call, value, start):
    model = make_model()  # One of its own, whose weights become NaN.
    data = make_data(10)
    data[0][6, 2, 1] = value
    with pytest.raises(UserError) as caught:
        run(model, data, every=20, per_call=per_call, first=start)
    step = start + 7
    assert f"at step {step} (epoch {step / 10:.2f}): training has div" in str(caught.value)
    assert str(caught.value).startswith("the loss is nan")


def test_too_many_unreadable_images(model):
    data = make_data(9)
    data[2][[1, 4, 7], 0] = 0
    assert [row["skipped"] for row in run(model, data, max_bad_images=3).rows] == [1, 1, 1]
    with pytest.raises(UserError, match=r"3 images could not be read .* max_bad_images=2; "):
        run(model, data, max_bad_images=2)
    # An evaluation starts the count anew.
    run(model, data, epochs=2, max_bad_images=3)


def test_an_incomplete_evaluation_is_a_bug(model):
    validation = make_data(5)
    validation[2][0, 0] = 0  # not lost, only unreadable
    run(model, make_data(1), validation=validation, validated=20)
    for examples in (19, 21):
        with pytest.raises(RuntimeError, match=f"saw 20 images, but there are {examples}"):
            run(model, make_data(1), validation=validation, validated=examples)
    with pytest.raises(RuntimeError):
        check_evaluated({"examples": 9.0, "skipped": 0.0}, 10)
    check_evaluated({"examples": 9.0, "skipped": 1.0}, 10)


class Overflow(keras.layers.Layer):
    """Returns its inputs, whose gradients overflow."""

    def call(self, inputs):
        @tf.custom_gradient
        def unchanged(inputs):
            return tf.identity(inputs), lambda gradients: gradients * np.inf

        return unchanged(inputs)


@pytest.mark.parametrize(("layer", "said"), [(Overflow, 1), (keras.layers.Identity, 0)])
def test_gradients_that_always_overflow_are_named_once(layer, said, capsys):
    warn_once.cache_clear()
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(6, use_bias=False, kernel_initializer="identity")(inputs)
    model = Classifier(inputs, layer()(outputs))
    optimizer = keras.optimizers.SGD(0.0)
    model.compile(keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=2))
    recorder = run(model, make_data(9))
    assert [row["step"] for row in recorder.rows] == [3, 6, 9]
    assert capsys.readouterr().err.count("even without a loss scale") == said
    # That is why.
    assert int(optimizer.iterations) == (0 if said else 9)
