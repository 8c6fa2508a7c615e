"""LARS against TensorFlow Model Garden's, which was written by others.

With ``d`` the weight decay, the two scale the rate of a weight ``w`` with the gradient ``g`` by::

    ours:           eeta * |w| / (|g| + d * |w|)        the papers' form
    Model Garden:   eeta * |w| / |g + d * w|            the norm of the decayed gradient

All else is the same: both update by ``g + d * w``, with the rate inside the momentum (its
``classic_momentum``), and excluded variables are neither decayed nor scaled. As |g + d * w| is at
most |g| + d * |w|, its updates are never the smaller ones. The two agree where there is no decay or
``g`` points along ``w``; elsewhere the ratio of these norms, times its ``eeta``, removes the
difference. (Without ``classic_momentum`` it scales by the norm of the momentum, not of the
gradient: another algorithm, to which ours has no equal.)

The environment is made by the tool that users have for it, which needs pip's index for one wheel of
3 MB. Where that cannot be had these tests fail: skipped, they would say nothing.
"""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.lab.benchmarks.optimizer.model_garden_worker import load_lars
from imagenet_fast.optimizers import LARS, Role, variable_roles

STEPS = 50
# Exact in float32, in which Keras' older optimizers keep it.
RATE = 8.0
DECAY = 0.5
SHAPES = [(3, 3, 4, 8), (8,), (8, 10), (10,)]
WEIGHTS = [True, False, True, False]

# In the default run, test_lars.py compares with NumPy, which needs no index.
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def garden_lars(model_garden):
    """Model Garden's class."""
    (packages,) = model_garden.glob("lib/python*/site-packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        return load_lars()


def problem(dtype):
    """Weights, and the gradients of each step."""
    generator = np.random.default_rng(0)
    start = [generator.normal(size=shape).astype(dtype) for shape in SHAPES]
    gradients = [[generator.normal(size=s).astype(dtype) for s in SHAPES] for _ in range(STEPS)]
    return start, gradients


def pair(garden_lars, weights, decay=0.0, **options):
    """Our optimizer and theirs, with the same options."""
    ours = LARS(RATE, weight_decay=decay, weight_decay_mask=weights, trust_mask=weights, **options)
    theirs = garden_lars(
        RATE, weight_decay_rate=decay, exclude_from_weight_decay=["excluded"], **options
    )
    return ours, theirs


def variables(start, weights):
    """Model Garden excludes by name."""
    return [
        tf.Variable(value, name="weight" if weight else "excluded")
        for value, weight in zip(start, weights)
    ]


def difference(ours, theirs, start):
    """The greatest of any element, relative to how far its variable has moved."""
    return np.max(
        [
            np.abs(a.numpy() - b.numpy()).max() / np.abs(a.numpy() - s).max()
            for a, b, s in zip(ours, theirs, map(np.asarray, start))
        ]
    )


def cut(value):
    """A sixteenth of each longer side, so that the steps stay short."""
    return value[tuple(slice(side // 16 if side > 16 else side) for side in value.shape)]


def test_resnet50_without_decay(garden_lars):
    network = models.build("resnet50", 1000, (224, 224, 3))
    start = [cut(variable.numpy()) for variable in network.trainable_variables]
    weights = [role is Role.WEIGHT for role in variable_roles(network)]
    ours, theirs = variables(start, weights), variables(start, weights)
    our_lars, their_lars = pair(garden_lars, weights)
    noise = [tf.random.stateless_normal(v.shape, (0, i)) for i, v in enumerate(ours)]
    scales = np.random.default_rng(0).normal(size=(STEPS, 2, len(start))).astype("float32")

    @tf.function
    def step(scale):
        # Of another length and direction in each step.
        gradients = [scale[0, i] * noise[i] + scale[1, i] * start[i] for i in range(len(start))]
        our_lars.apply_gradients(zip(gradients, ours))
        their_lars.apply_gradients(zip(gradients, theirs))

    for scale in scales:
        step(scale)
    assert len(ours) == 161
    assert difference(ours, theirs, start) < 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 2e-6), ("float64", 1e-12)],
)
def test_with_decay_once_the_difference_is_removed(garden_lars, nesterov, dtype, tolerance):
    start, gradients = problem(dtype)
    ours = variables(start, WEIGHTS)
    our_lars, _ = pair(garden_lars, WEIGHTS, decay=DECAY, nesterov=nesterov)

    def train_theirs(removed):
        """Each variable has an optimizer, whose eeta is its own."""
        theirs = variables(start, WEIGHTS)
        optimizers = [pair(garden_lars, WEIGHTS, decay=DECAY, nesterov=nesterov)[1] for _ in theirs]
        for grads in gradients:
            for optimizer, g, w in zip(optimizers, grads, theirs):
                if removed:
                    optimizer.eeta = 0.001 / excess(g, w.numpy())
                optimizer.apply_gradients([(tf.constant(g), w)])
        return theirs

    for grads in gradients:
        our_lars.apply_gradients(zip(map(tf.constant, grads), ours))
    assert difference(ours, train_theirs(removed=True), start) < tolerance
    assert difference(ours, train_theirs(removed=False), start) > 1e-2


def test_difference_of_an_update(garden_lars):
    start, (grads, *_) = problem("float64")
    moved = []
    for optimizer in pair(garden_lars, WEIGHTS, decay=DECAY):
        own = variables(start, WEIGHTS)
        optimizer.apply_gradients(zip(map(tf.constant, grads), own))
        moved.append([variable.numpy() - value for variable, value in zip(own, start)])
    for weight, g, w, ours, theirs in zip(WEIGHTS, grads, start, *moved):
        factor = excess(g, w) if weight else 1.0
        assert factor > 1.1 or not weight
        np.testing.assert_allclose(theirs, factor * ours, rtol=1e-12, atol=1e-14)


def test_with_decay_and_gradients_along_the_weights(garden_lars):
    start, _ = problem("float64")
    ours, theirs = variables(start, WEIGHTS), variables(start, WEIGHTS)
    our_lars, their_lars = pair(garden_lars, WEIGHTS, decay=DECAY)
    for step in range(STEPS):
        for optimizer, own in ((our_lars, ours), (their_lars, theirs)):
            optimizer.apply_gradients([((0.5 + step / STEPS) * w, w) for w in own])
    assert difference(ours, theirs, start) < 1e-12


def excess(gradient, weight):
    """How much larger Model Garden's trust ratio is."""
    norm = np.linalg.norm
    parts = norm(gradient.ravel()) + DECAY * norm(weight.ravel())
    return parts / norm((gradient + DECAY * weight).ravel())
