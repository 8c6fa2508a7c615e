"""Lookahead against NumPy, step by step."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.optimizers import Lookahead

SHAPES = [(3, 4), (5,), ()]


def problem(steps):
    """Variables, and what is added to them in each step."""
    generator = np.random.default_rng(0)

    def normal():
        return [generator.normal(size=shape).astype("float32") for shape in SHAPES]

    return [tf.Variable(value) for value in normal()], [normal() for _ in range(steps)]


@pytest.mark.parametrize(("every", "total"), [(5, 20), (5, 23), (1, 7), (2, 3)])
def test_values(every, total):
    variables, moves = problem(total)
    lookahead = Lookahead(variables, 0.95, every, total)
    fast = [variable.numpy().astype("float64") for variable in variables]
    slow = list(fast)
    for step, move in enumerate(moves, start=1):
        for variable, change in zip(variables, move):
            variable.assign_add(change)
        lookahead.update(step)
        fast = [value + change for value, change in zip(fast, move)]
        if step % every == 0:
            keep = 0.95**every * (step / total) ** 3
            fast = slow = [keep * own + (1 - keep) * value for own, value in zip(slow, fast)]
        if step == total:
            fast = slow
        for found, expected in zip([*variables, *lookahead.averages], [*fast, *slow]):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    for variable, average in zip(variables, lookahead.averages):
        np.testing.assert_array_equal(variable.numpy(), average.numpy())


def test_last_step_replaces_the_weights():
    """.95 ** 5 = .7737809375; and the last weights are the slow ones, whichever step is last."""
    variable = tf.Variable(0.0)
    lookahead = Lookahead([variable], 0.95, every=5, total_steps=20)
    variable.assign(1.0)
    lookahead.update(20)
    assert variable.numpy() == pytest.approx(1 - 0.7737809375, rel=1e-6)
    # Steps beyond, of a run that was made longer: as strong.
    variable.assign(lookahead.averages[0] + 1.0)
    before = lookahead.averages[0].numpy()
    lookahead.update(25)
    assert variable.numpy() == pytest.approx(before + 1 - 0.7737809375, rel=1e-6)

    variable = tf.Variable(0.5)
    lookahead = Lookahead([variable], 0.95, every=5, total_steps=22)
    variable.assign(1.0)
    lookahead.update(21)
    assert variable.numpy() == 1.0
    lookahead.update(22)
    assert variable.numpy() == 0.5


def test_integer_variables_are_unchanged():
    variables = [tf.Variable(1.0), tf.Variable(7)]
    lookahead = Lookahead(variables, 0.95, every=1, total_steps=1)
    variables[1].assign(8)
    lookahead.update(1)
    assert len(lookahead.averages) == 1
    assert variables[1].numpy() == 8


def test_resumes_from_a_checkpoint(tmp_path):
    def steps(variables, lookahead, moves, first):
        for step, move in enumerate(moves, start=first):
            for variable, change in zip(variables, move):
                variable.assign_add(change)
            lookahead.update(step)

    variables, moves = problem(12)
    lookahead = Lookahead(variables, 0.95, 5, 12)
    steps(variables, lookahead, moves[:7], 1)
    path = tf.train.Checkpoint(v=variables, a=lookahead.averages).write(str(tmp_path / "c"))
    steps(variables, lookahead, moves[7:], 8)

    again, _ = problem(0)
    other = Lookahead(again, 0.95, 5, 12)
    tf.train.Checkpoint(v=again, a=other.averages).read(path).assert_consumed()
    steps(again, other, moves[7:], 8)
    for a, b in zip(again, variables):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_restart():
    variable = tf.Variable(0.0)
    lookahead = Lookahead([variable], 0.95, every=5, total_steps=7)
    variable.assign(3.0)
    lookahead.restart()
    variable.assign(4.0)
    lookahead.update(7)
    assert variable.numpy() == 3.0


def test_no_steps():
    with pytest.raises(UserError, match="lookahead every 5 steps would discard all 4 steps"):
        Lookahead([], 0.95, 5, 4)
    with pytest.raises(UserError, match="total_steps is 0, but must be positive"):
        Lookahead([], 0.95, 5, 0)
