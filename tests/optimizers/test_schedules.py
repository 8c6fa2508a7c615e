"""The schedules alone; tests/training/build/test_schedule.py has those of the recipes."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.optimizers import (
    ConstantWarmup,
    CosineDecay,
    GradualWarmup,
    PiecewiseLinear,
    PolynomialDecay,
    StepDecay,
)

STEPS = StepDecay(3.2, [4680, 9360, 12480], 0.1)
EACH = {
    "steps": STEPS,
    "polynomial": PolynomialDecay(10.0, 1e-4, steps=11582, first_step=1565, power=2.0),
    "cosine": CosineDecay(0.5, 0.01, steps=4679, first_step=1),
    "piecewise linear": PiecewiseLinear([-1, 484, 2327], [0.0, 0.4, 0.0]),
    "gradual warmup": GradualWarmup(STEPS, start=0.1, steps=780),
    "constant warmup": ConstantWarmup(STEPS, start=0.1, steps=780),
    "part of a step": GradualWarmup(PolynomialDecay(32.0, 1e-4, 3012, 547), 0.0, 547.37),
}


def rate(schedule, step):
    return schedule(step).numpy()


def rates(schedule, count):
    return [rate(schedule, step) for step in range(count)]


def test_step_decay():
    assert rates(StepDecay(1.0, [2, 4, 4], 0.5), 6) == [1.0, 1.0, 0.5, 0.5, 0.125, 0.125]


def test_step_decay_without_steps_is_constant():
    assert rates(StepDecay(0.3), 3) == [np.float32(0.3)] * 3


def test_polynomial_decay_of_a_run():
    """You et al. 2017: rate * (1 - t/T)^2."""
    schedule = PolynomialDecay(2.0, 0.0, steps=4)
    assert rates(schedule, 6) == [2.0, 2 * 9 / 16, 0.5, 2 / 16, 0.0, 0.0]


@pytest.mark.parametrize(("power", "half"), [(1.0, 2.0), (2.0, 1.5), (3.0, 1.25)])
def test_polynomial_decay_after_its_first_step(power, half):
    schedule = PolynomialDecay(3.0, 1.0, steps=4, first_step=10, power=power)
    for step, expected in ((0, 3), (10, 3), (12, half), (14, 1), (10**9, 1)):
        assert rate(schedule, step) == expected


def test_cosine_decay():
    schedule = CosineDecay(0.7, 0.1, steps=1000, first_step=20)
    for step in (20, 21, 270, 520, 770, 1019, 1020):
        exact = 0.1 + 0.6 * (1 + math.cos(math.pi * (step - 20) / 1000)) / 2
        assert rate(schedule, step) == pytest.approx(exact, rel=2e-7)
    assert rate(schedule, 19) == rate(schedule, 20) == np.float32(0.7)
    assert rate(schedule, 1020) == rate(schedule, 1021) == np.float32(0.1)


@pytest.mark.parametrize("kind", [PolynomialDecay, CosineDecay])
def test_last_steps_keep_their_digits(kind):
    """Where the rate is a billionth of the first, float32's 1 - progress would be lost in noise."""
    schedule = kind(10.0, 0.0, steps=100_000)
    for left in (1, 2, 3):
        share = left / 100_000
        exact = share**2 if kind is PolynomialDecay else math.sin(math.pi / 2 * share) ** 2
        assert rate(schedule, 100_000 - left) == pytest.approx(10 * exact, rel=5e-7)


def test_piecewise_linear():
    schedule = PiecewiseLinear([2, 4, 8], [1.0, 3.0, 1.0])
    assert rates(schedule, 11) == [1, 1, 1, 2, 3, 2.5, 2, 1.5, 1, 1, 1]


def test_knots_before_the_start_and_at_one_step():
    """A line may come from before step 0, and the rate may jump."""
    schedule = PiecewiseLinear([-2, 2, 2, 4], [0.0, 4.0, 1.0, 0.0])
    assert rates(schedule, 6) == [2.0, 3.0, 1.0, 0.5, 0.0, 0.0]
    assert rates(PiecewiseLinear([5], [0.25]), 7) == [0.25] * 7


def test_gradual_warmup_meets_the_schedule():
    """Also one that has changed by then."""
    schedule = GradualWarmup(StepDecay(8.0, [3, 6], 0.5), start=1.0, steps=4)
    assert rates(schedule, 8) == [1, 1.75, 2.5, 3.25, 4, 4, 2, 2]


def test_constant_warmup_jumps():
    schedule = ConstantWarmup(StepDecay(8.0, [3, 6], 0.5), start=1.0, steps=2)
    assert rates(schedule, 7) == [1, 1, 8, 4, 4, 4, 2]


@pytest.mark.parametrize("kind", [GradualWarmup, ConstantWarmup])
@pytest.mark.parametrize("steps", [0, 0.0])
def test_warmup_of_no_steps(kind, steps):
    schedule = kind(StepDecay(8.0, [3], 0.5), start=1.0, steps=steps)
    assert rates(schedule, 4) == [8, 8, 8, 4]


def test_warmup_of_part_of_a_step():
    """A step at or below the length is warmup; the decay counts from the whole steps before."""
    decay = PolynomialDecay(10.0, 0.0, steps=4, first_step=2)
    assert rates(GradualWarmup(decay, 0.0, 2.5), 5) == [0, 4, 8, 10 * (3 / 4) ** 2, 10 / 4]
    assert rates(ConstantWarmup(decay, 1.0, 2.5), 4) == [1, 1, 1, 10 * (3 / 4) ** 2]
    assert rates(GradualWarmup(decay, 3.0, 0.5), 3) == [3, 10, 10]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PolynomialDecay(1.0, 0.0, steps=0),
        lambda: CosineDecay(1.0, 0.0, steps=-1),
        lambda: PiecewiseLinear([], []),
        lambda: PiecewiseLinear([0, 5], [1.0]),
        lambda: PiecewiseLinear([5, 0], [1.0, 2.0]),
        lambda: GradualWarmup(0.1, 0.0, steps=5),
    ],
)
def test_invalid_schedules(make):
    with pytest.raises(ValueError, match=r"steps|schedule is 0\.1, but must be"):
        make()


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.float32])
@pytest.mark.parametrize("schedule", EACH.values(), ids=EACH)
def test_steps_of_any_type_and_inside_a_graph(schedule, dtype):
    """Keras' iterations are int64; a callback may pass what it likes."""
    in_graph = tf.function(schedule.__call__)
    for step in (0, 390, 547, 548, 780, 1565, 4680, 13147):
        got = in_graph(tf.constant(step, dtype))
        assert got.dtype == tf.float32
        assert got.shape == ()
        # A graph multiplies by the inverse where a division stands.
        assert got.numpy() == pytest.approx(rate(schedule, step), rel=3e-7)


@pytest.mark.parametrize(
    ("schedule", "exact"),
    [
        (PolynomialDecay(0.3, 1e-4, steps=49, first_step=7), {0: 0.3, 7: 0.3, 56: 1e-4}),
        (CosineDecay(0.3, 1e-4, steps=49, first_step=7), {0: 0.3, 7: 0.3, 56: 1e-4}),
        (PiecewiseLinear([0, 49, 98], [0.1, 0.3, 0.7]), {0: 0.1, 49: 0.3, 98: 0.7, 99: 0.7}),
        (GradualWarmup(StepDecay(0.3), 0.1, 49), {0: 0.1, 49: 0.3}),
    ],
)
def test_boundaries_are_exact_in_a_graph(schedule, exact):
    """49 * (1 / 49) is not 1 in float32."""
    in_graph = tf.function(schedule.__call__)
    for step, expected in exact.items():
        assert in_graph(tf.constant(step, tf.int64)).numpy() == np.float32(expected)


@pytest.mark.parametrize("schedule", EACH.values(), ids=EACH)
def test_serialization(schedule):
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert type(again) is type(schedule)
    assert again.get_config() == schedule.get_config()
    for step in (0, 5, 779, 780, 4679, 4680, 12480):
        assert rate(again, step) == rate(schedule, step)
