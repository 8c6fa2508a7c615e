"""Learning rates: Goyal et al. 2017 by the number, and the schedules alone."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from imagenet_fast.config import Config
from imagenet_fast.data.info import read_info
from imagenet_fast.data.pipeline import steps_per_epoch
from imagenet_fast.optimizers import GradualWarmup, StepDecay
from imagenet_fast.training.build import build_schedule

# ImageNet at the batch of 256 GPUs.
STEPS = 156
LARGE = build_schedule(Config(batch_size=8192), STEPS)


def rate(schedule, step):
    return schedule(step).numpy()


@pytest.mark.parametrize(
    ("batch", "steps"),
    [
        (256, 5004),
        (1024, 1251),
        (4096, 312),
        (8192, 156),
        (16384, 78),
        (32768, 39),
        (65536, 19),
    ],
)
def test_steps_of_an_epoch_of_imagenet(batch, steps):
    config = Config(synthetic=True, num_classes=1000, batch_size=batch)
    assert steps_per_epoch(read_info(config), config) == steps


# --- The paper's schedule


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(0, 0.1), (2.5, 1.65), (5, 3.2), (29, 3.2), (30, 0.32), (60, 0.032), (80, 0.0032)],
)
def test_batch_of_8192(epoch, expected):
    assert rate(LARGE, round(epoch * STEPS)) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize(
    ("epoch", "before", "after"),
    [(5, None, 3.2), (30, 3.2, 0.32), (60, 0.32, 0.032), (80, 0.032, 0.0032)],
)
def test_boundaries_are_exact(epoch, before, after):
    step = epoch * STEPS
    if before is None:  # the last step of the warmup
        before = 0.1 + 3.1 * (step - 1) / step
    assert rate(LARGE, step - 1) == pytest.approx(before, rel=2e-7)
    assert rate(LARGE, step) == pytest.approx(after, rel=2e-7)
    assert rate(LARGE, step + 1) == pytest.approx(after, rel=2e-7)


def test_warmup_grows_by_the_same_amount_each_step():
    warmup = 5 * STEPS
    rates = np.array([rate(LARGE, step) for step in range(warmup + 1)], np.float64)
    assert rates[0] == np.float32(0.1)
    # Rounding to float32 does not add up over the steps.
    np.testing.assert_allclose(np.diff(rates), 3.1 / warmup, atol=5e-7)
    np.testing.assert_allclose(rates, 0.1 + 3.1 * np.arange(warmup + 1) / warmup, rtol=2e-7)


def test_rate_stays_at_the_end():
    assert rate(LARGE, 90 * STEPS - 1) == pytest.approx(0.0032, rel=2e-7)
    assert rate(LARGE, 10**9) == pytest.approx(0.0032, rel=2e-7)


@pytest.mark.parametrize(("batch", "steps", "first"), [(256, 5004, 0.1), (128, 10009, 0.05)])
def test_small_batches_have_no_warmup(batch, steps, first):
    schedule = build_schedule(Config(batch_size=batch), steps)
    assert isinstance(schedule, StepDecay)
    for epoch, expected in ((0, first), (1, first), (5, first), (30, first / 10)):
        assert rate(schedule, epoch * steps) == pytest.approx(expected, rel=2e-7)
    assert rate(schedule, 30 * steps - 1) == pytest.approx(first, rel=2e-7)


def test_batch_just_above_the_reference_warms_up():
    schedule = build_schedule(Config(batch_size=512), 2502)
    assert rate(schedule, 0) == pytest.approx(0.1)
    assert rate(schedule, 5 * 2502) == pytest.approx(0.2)


def test_options_of_the_schedule():
    config = Config(
        batch_size=1024,
        learning_rate=0.4,
        learning_rate_batch=512,
        warmup="10 steps",
        decay_at="102400 examples,204800 examples",
        decay_factor=0.5,
    )
    schedule = build_schedule(config, 50)
    for step, expected in ((0, 0.4), (5, 0.6), (10, 0.8), (99, 0.8), (100, 0.4), (200, 0.2)):
        assert rate(schedule, step) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("changes", [{"warmup": "0 epochs"}, {"learning_rate_batch": 0}])
def test_warmup_that_there_is_none(changes):
    config = Config(batch_size=8192, **changes)
    schedule = build_schedule(config, STEPS)
    assert rate(schedule, 0) == pytest.approx(config.scaled_learning_rate)


# --- The schedules


def test_step_decay():
    schedule = StepDecay(1.0, [2, 4, 4], 0.5)
    rates = [rate(schedule, step) for step in range(6)]
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.125, 0.125]
    assert rate(StepDecay(0.3, [], 0.1), 7) == np.float32(0.3)


def test_gradual_warmup_meets_the_schedule():
    """Also one that has changed by then."""
    schedule = GradualWarmup(StepDecay(8.0, [3, 6], 0.5), start=1.0, steps=4)
    assert [rate(schedule, step) for step in range(8)] == [1, 1.75, 2.5, 3.25, 4, 4, 2, 2]


def test_warmup_of_no_steps():
    schedule = GradualWarmup(StepDecay(8.0, [3], 0.5), start=1.0, steps=0)
    assert [rate(schedule, step) for step in (0, 3)] == [8, 4]


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.float32])
def test_steps_of_any_type_and_inside_a_graph(dtype):
    """Keras' iterations are int64; a callback may pass what it likes."""
    in_graph = tf.function(LARGE.__call__)
    for step in (0, 390, 780, 4680):
        got = in_graph(tf.constant(step, dtype))
        assert got.dtype == tf.float32
        assert got.shape == ()
        # A graph multiplies by the inverse where a division stands.
        assert got.numpy() == pytest.approx(rate(LARGE, step), rel=2e-7)


@pytest.mark.parametrize("schedule", [LARGE, StepDecay(0.1, [3, 6], 0.1)])
def test_survives_serialization(schedule):
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert type(again) is type(schedule)
    assert again.get_config() == schedule.get_config()
    for step in (0, 5, 779, 780, 4679, 4680, 12480):
        assert rate(again, step) == rate(schedule, step)
