"""The learning rates of the published recipes, by their numbers."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.config import Config
from imagenet_fast.data.info import read_info
from imagenet_fast.data.steps import steps_per_epoch
from imagenet_fast.optimizers import SGD, ConstantWarmup
from imagenet_fast.optimizers.batch_tables import options_for_batch
from imagenet_fast.optimizers.options import ScheduleOptions
from imagenet_fast.training.build.schedule import build_schedule, warn_of_short_run
from imagenet_fast.training.schedule_steps import total_steps, warmup_steps

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


# --- Goyal et al. 2017


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


def test_warmup_is_linear_by_step():
    warmup = 5 * STEPS
    steps = [step for first in range(0, warmup, 30) for step in (first, first + 1)] + [warmup]
    rates = np.array([rate(LARGE, step) for step in steps], np.float64)
    assert rates[0] == np.float32(0.1)
    # Rounding to float32 does not add up over the steps.
    np.testing.assert_allclose(np.diff(rates[:-1])[::2], 3.1 / warmup, atol=5e-7)
    np.testing.assert_allclose(rates, 0.1 + 3.1 * np.array(steps) / warmup, rtol=2e-7)


def test_learning_rate_is_constant_after_the_end():
    assert rate(LARGE, 90 * STEPS - 1) == pytest.approx(0.0032, rel=2e-7)
    assert rate(LARGE, 10**9) == pytest.approx(0.0032, rel=2e-7)


@pytest.mark.parametrize(("batch", "steps", "first"), [(256, 5004, 0.1), (128, 10009, 0.05)])
def test_small_batches_have_no_warmup(batch, steps, first):
    schedule = build_schedule(Config(batch_size=batch), steps)
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


def test_decay_every():
    config = Config(
        batch_size=32, learning_rate=1.0, warmup="0 steps", duration="90 steps", rate_scaling="none"
    )
    schedule = build_schedule(config.replace(decay_every="2.4 epochs", decay_factor=0.5), 10)
    for step in range(90):
        assert rate(schedule, step) == pytest.approx(0.5 ** (step // 24), rel=2e-7)


@pytest.mark.parametrize("changes", [{"warmup": "0 epochs"}, {"rate_scaling": "none"}])
def test_no_warmup(changes):
    config = Config(batch_size=8192, **changes)
    schedule = build_schedule(config, STEPS)
    assert rate(schedule, 0) == pytest.approx(config.scaled_learning_rate)


def test_constant_warmup():
    """Table 1: the rate of one server for 5 epochs, then 32 times as much."""
    schedule = build_schedule(Config(batch_size=8192), STEPS)
    schedule = ConstantWarmup(schedule.schedule, schedule.start, schedule.steps)
    for step, expected in ((0, 0.1), (779, 0.1), (780, 3.2), (4679, 3.2), (4680, 0.32)):
        assert rate(schedule, step) == pytest.approx(expected, rel=2e-7)


def test_warmup_from_0():
    """Google's variant: 3.2 * epoch / 5."""
    schedule = build_schedule(Config(batch_size=8192, warmup_start=0.0), STEPS)
    for epoch, expected in ((0, 0), (2.5, 1.6), (5, 3.2), (30, 0.32)):
        assert rate(schedule, round(epoch * STEPS)) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize(("scaling", "expected"), [("sqrt", 0.1 * 32**0.5), ("none", 0.1)])
def test_other_scaling_rules(scaling, expected):
    schedule = build_schedule(Config(batch_size=8192, rate_scaling=scaling), STEPS)
    assert rate(schedule, 0) == pytest.approx(0.1)
    assert rate(schedule, 5 * STEPS) == pytest.approx(expected)


def test_optimizer_uses_the_learning_rate_of_its_step():
    """metrics.jsonl and the report have the rate of the last update, which is step n - 1."""
    optimizer = SGD(build_schedule(Config(batch_size=8192, warmup="4 steps"), STEPS))
    variable = tf.Variable([1.0])
    for expected in (0.1, 0.875, 1.65, 2.425, 3.2, 3.2):
        optimizer.apply_gradients([(tf.constant([0.0]), variable)])
        steps = tf.convert_to_tensor(optimizer.iterations)
        # Keras 3 tells the rate of the next update.
        used = optimizer.learning_rate if KERAS_2 else optimizer._learning_rate(steps - 1)
        assert used.numpy() == pytest.approx(expected)


# --- MLPerf and Google: LARS

MLPERF = {"schedule": "polynomial", "end_learning_rate": 1e-4}


def test_mlperf_4096():
    """Their steps of an epoch, rounded up, are 313."""
    config = Config(duration="42 epochs", **MLPERF, **options_for_batch("mlperf", 4096))
    assert (total_steps(config, 313), warmup_steps(config, 313)) == (13_146, 1565)
    schedule = build_schedule(config, 313)
    assert schedule.schedule.steps == 11_582
    for step, expected, digits in (
        (0, 0, 1e-9),
        (1, 0.00639, 1e-6),
        (782, 4.996805, 1e-6),
        (1565, 10, 1e-9),
        (1566, 9.998273, 1e-6),
        (7355, 2.500938, 1e-6),
        (13_146, 1.0e-4, 1e-7),
    ):
        assert rate(schedule, step) == pytest.approx(expected, abs=digits, rel=0)


def test_mlperf_32768():
    config = Config(duration="72 epochs", **MLPERF, **options_for_batch("mlperf", 32768))
    assert (total_steps(config, 40), warmup_steps(config, 40)) == (2880, 1000)
    schedule = build_schedule(config, 40)
    assert schedule.schedule.steps == 1881
    for step, expected in ((500, 15.6), (1000, 31.2), (1940, 7.808371)):
        assert rate(schedule, step) == pytest.approx(expected, abs=1e-6, rel=0)


GOOGLE = {
    "rate_scaling": "none",
    "warmup_start": 0.0,
    "schedule": "polynomial",
    "end_learning_rate": 1e-4,
}


@pytest.mark.parametrize(
    ("batch", "peak", "epochs", "warmup", "total"),
    [
        (4096, 10.0, 5, 1563, 28_464),
        (8192, 10.0, 5, 781, 14_232),
        (16384, 25.0, 5, 390, 7116),
        (32768, 32.0, 14, 547, 3558),
        (65536, 35.6, 40, 781, 1760),
    ],
)
def test_google_tpu_pod(batch, peak, epochs, warmup, total):
    """The warmup is up to an epoch's exact share of a step, the decay counts from whole steps."""
    config = Config(
        batch_size=batch,
        learning_rate=peak,
        warmup=f"{epochs * 1_281_167} examples",
        duration=f"{total} steps",
        **GOOGLE,
    )
    schedule = build_schedule(config, 1_281_167 // batch)
    length = epochs * 1_281_167 / batch
    assert int(length) == warmup
    assert rate(schedule, 0) == 0
    for step in (1, warmup // 2, warmup):
        assert rate(schedule, step) == pytest.approx(peak * step / length, rel=2e-7)
    for step in (warmup + 1, (warmup + total) // 2, total - 1):
        progress = (step - warmup) / (total - warmup + 1)
        expected = (peak - 1e-4) * (1 - progress) ** 2 + 1e-4
        assert rate(schedule, step) == pytest.approx(expected, rel=5e-7)


# --- You et al. 2017


def test_polynomial_decay_without_warmup():
    config = Config(schedule="polynomial", duration="100 epochs", learning_rate=4.0)
    schedule = build_schedule(config, 5004)
    total = 100 * 5004
    for step in (0, 1, total // 4, total // 2, total - 1, total):
        assert rate(schedule, step) == pytest.approx(4 * (1 - step / total) ** 2, rel=5e-7)


# --- Page 2019

PAGE = {
    "batch_size": 512,
    "learning_rate": 0.4,
    "learning_rate_batch": 512,
    "schedule": "piecewise_linear",
    "knots_at": "0 epochs,5 epochs,24 epochs",
    "knots": "0,1,0",
    "duration": "24 epochs",
}


@pytest.mark.parametrize(
    ("counted", "expected"),
    [(1, 0.4 / 485), (485, 0.4), (486, 0.4 - 0.4 / 1843), (12 * 97, 0.4 * 12 / 19), (24 * 97, 0)],
)
def test_page_counts_steps_from_1(counted, expected):
    schedule = build_schedule(Config(**PAGE), 97)
    assert rate(schedule, counted - 1) == pytest.approx(expected, rel=1e-6)
    assert round(float(rate(schedule, 12 * 97 - 1)), 6) == 0.252632


def test_knots_are_fractions_of_the_scaled_learning_rate():
    """And have the warmup in them, also where the scaled rate is higher than the given one."""
    schedule = build_schedule(Config(**{**PAGE, "learning_rate_batch": 256}), 97)
    assert rate(schedule, 0) == pytest.approx(0.8 / 485)
    assert rate(schedule, 5 * 97 - 1) == pytest.approx(0.8)


# --- Other schedules


def test_cosine():
    config = Config(batch_size=8192, schedule="cosine", end_learning_rate=0.01)
    schedule = build_schedule(config, STEPS)
    first, steps = 780, 90 * STEPS - 780 + 1
    assert rate(schedule, first) == np.float32(3.2)
    for step in (first + 1, first + steps // 3, 90 * STEPS - 1):
        expected = 0.01 + 3.19 * (1 + np.cos(np.pi * (step - first) / steps)) / 2
        assert rate(schedule, step) == pytest.approx(expected, rel=1e-6)
    # Without a warmup it takes the whole run.
    schedule = build_schedule(Config(schedule="cosine", duration="100 steps"), 10)
    assert rate(schedule, 50) == pytest.approx(0.05)
    assert rate(schedule, 100) == 0


def test_constant():
    schedule = build_schedule(Config(batch_size=8192, schedule="constant"), STEPS)
    assert rate(schedule, 390) == pytest.approx(1.65)
    assert rate(schedule, 780) == rate(schedule, 10**6) == np.float32(3.2)


# --- Mistakes


@pytest.mark.parametrize("schedule", ["constant", "steps", "polynomial", "cosine"])
def test_warmup_may_last_as_long_as_the_run(schedule):
    config = Config(batch_size=512, schedule=schedule, duration="5 epochs")
    assert rate(build_schedule(config, 10), 50) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"duration": "4 epochs"},
            r"warmup 5 epochs \(50 steps\) is longer than the run, duration 4 epochs \(40 steps\)",
        ),
        (
            {"duration": "10 steps", "warmup": "5400 examples"},
            r"warmup 5400 examples \(10.5469 steps\) is longer than the run",
        ),
        (
            {**PAGE, "duration": "20 epochs"},
            r"knots_at goes to 24 epochs \(240 steps\), but the run, duration 20 epochs, has 200",
        ),
        ({"duration": "0.01 epochs"}, "duration 0.01 epochs is less than one step of 512 images"),
    ],
)
def test_durations_longer_than_the_run(changes, message):
    with pytest.raises(UserError, match=message):
        build_schedule(Config(**{"batch_size": 512, **changes}), steps_per_epoch=10)


def test_no_warmup_is_never_too_long():
    build_schedule(Config(batch_size=256, duration="1 epochs"), steps_per_epoch=10)


def test_a_warmup_of_most_of_the_run_is_reported(capsys):
    options = ScheduleOptions(
        duration="40 steps", warmup="1.05 epochs", batch_size=512, schedule="cosine"
    )
    warn_of_short_run(options, 20)
    expected = "the warmup takes 52% of the run: warmup is 1.05 epochs, duration 40 steps"
    assert expected in capsys.readouterr().err
    warn_of_short_run(options.replace(warmup="1 epoch"), 20)
    warn_of_short_run(options.replace(batch_size=256), 20)  # without warmup
    assert not capsys.readouterr().err


def test_decays_after_the_end_are_told(capsys):
    options = ScheduleOptions(duration="30 steps", decay_at="1 epoch,2 epochs", batch_size=32)
    warn_of_short_run(options, 20)
    expected = "1 of 2 decays of the learning rate come after the end of the run: decay_at is "
    assert expected in capsys.readouterr().err
    warn_of_short_run(options.replace(duration="41 steps"), 20)
    warn_of_short_run(options.replace(schedule="constant"), 20)
    assert not capsys.readouterr().err
