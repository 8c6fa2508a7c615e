"""Sums over batches, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.training.step.metric_sums import MetricSums, batch_sums

NAN, INF = np.nan, np.inf


def sums(logits, labels, losses=None, weights=None):
    """What batch_sums returns, as a list."""
    logits = np.array(logits, "float32")
    losses = np.zeros(len(labels)) if losses is None else losses
    weights = np.ones(len(labels)) if weights is None else weights
    got = batch_sums(
        tf.constant(logits),
        tf.constant(losses, tf.float32),
        tf.constant(labels, tf.int32),
        tf.constant(weights, tf.float32),
    )
    assert got.dtype == tf.float32
    assert got.shape == (5,)
    return got.numpy().tolist()


def reference(logits, labels, losses, weights):
    """One image at a time, by sorting."""
    totals = np.zeros(5)
    for scores, label, loss, weight in zip(logits, labels, losses, weights):
        if weight:
            best = np.argsort(-scores)
            totals += [loss, best[0] == label, label in best[:5], 1, 0]
        elif label >= 0:
            totals[4] += 1
    return totals


@pytest.mark.parametrize("classes", [2, 5, 6, 1000])
def test_against_numpy(classes):
    generator = np.random.default_rng(classes)
    logits = generator.normal(size=(200, classes)).astype("float32")
    labels = generator.integers(0, classes, 200)
    # Some are easy, so that all counts differ.
    logits[np.arange(60), labels[:60]] += 4
    weights = (generator.uniform(size=200) < 0.8).astype("float32")
    labels[190:], weights[190:] = -1, 0  # padding
    losses = generator.uniform(size=200).astype("float32")
    got = sums(logits, labels, losses, weights)
    expected = reference(logits, labels, losses, weights)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    assert got[1:] == expected[1:].tolist()
    assert 0 < expected[1] <= expected[2] <= expected[3] < 190


@pytest.mark.parametrize(
    ("logits", "label", "top1", "top5"),
    [
        ([3, 2, 1, 0, -1, -2], 0, 1, 1),
        ([3, 2, 1, 0, -1, -2], 1, 0, 1),
        ([3, 2, 1, 0, -1, -2], 4, 0, 1),
        ([3, 2, 1, 0, -1, -2], 5, 0, 0),
        # Ties count against the model: a network that answers all alike knows nothing.
        ([0, 0, 0, 0, 0, 0], 0, 0, 0),
        ([1, 1, 0, 0, 0, 0], 0, 0, 1),
        ([4, 3, 2, 1, 0, 0], 4, 0, 0),
        # NaN is no answer, and beats none.
        ([NAN] * 6, 0, 0, 0),
        ([NAN, 1, 2, 3, 4, 5], 0, 0, 0),
        ([NAN, 5, 4, 3, 2, 1], 1, 1, 1),
        ([INF, 5, 4, 3, 2, 1], 0, 1, 1),
        ([-INF, 5, 4, 3, 2, 1], 0, 0, 0),
    ],
)
def test_rank(logits, label, top1, top5):
    assert sums([logits], [label]) == [0, top1, top5, 1, 0]


@pytest.mark.parametrize(
    ("labels", "top1", "top5"),
    [
        ([1, 0, 0, 0, 0, 1], 1, 1),
        ([0, 1, 1, 0, 0, 0], 0, 1),
        ([0, 0, 0, 0, 0, 1], 0, 0),
        ([0, 0, 0, 0, 0, 0], 0, 0),
    ],
)
def test_rank_of_the_best_of_several_labels(labels, top1, top5):
    assert sums([[3, 2, 1, 0, -1, -2]], [labels]) == [0, top1, top5, 1, 0]


def test_with_five_or_fewer_classes_top5_is_1():
    assert sums([[0, 1, 2], [2, 1, 0]], [0, 0]) == [0, 1, 2, 2, 0]


def test_padding_and_unreadable_images():
    logits = [[1, 0], [1, 0], [1, 0], [1, 0]]
    # Right, unreadable, padding, wrong.
    got = sums(logits, [0, 0, -1, 1], losses=[0.5, 8, 16, 2], weights=[1, 0, 0, 1])
    assert got == [2.5, 1, 2, 2, 1]
    assert sums(logits, [-1] * 4, [1] * 4, [0] * 4) == [0, 0, 0, 0, 0]


# --- MetricSums


NAMES = ("loss", "top1", "top5", "examples", "skipped")


def numbers(results):
    """The results as numbers, in the order of NAMES."""
    assert set(results) == set(NAMES)
    return [float(results[name]) for name in NAMES]


def test_means_over_all_images():
    totals = MetricSums()
    assert numbers(totals.results()) == [0, 0, 0, 0, 0]
    totals.add(tf.constant([6.0, 1.0, 2.0, 3.0, 1.0]))
    totals.add(tf.constant([4.0, 1.0, 1.0, 1.0, 0.0]))
    assert numbers(totals.results()) == [2.5, 0.5, 0.75, 4, 1]


def test_reset():
    totals = MetricSums()
    totals.add(tf.ones([5]))
    totals.reset()
    assert numbers(totals.results()) == [0, 0, 0, 0, 0]
    totals.add(tf.constant([6.0, 1.0, 2.0, 4.0, 1.0]))
    assert numbers(totals.results()) == [1.5, 0.25, 0.5, 4, 1]


def test_counts_imagenet_exactly():
    totals = MetricSums()
    totals.add(tf.constant([0.0, 0.0, 0.0, 1_281_167.0 * 13, 0.0]))
    totals.add(tf.constant([0.0, 0.0, 0.0, 1.0, 0.0]))
    assert float(totals.results()["examples"]) == 1_281_167 * 13 + 1


def test_inside_a_graph():
    totals = MetricSums()

    @tf.function
    def step(values):
        totals.add(values)
        return totals.results()

    step(tf.constant([2.0, 1.0, 1.0, 1.0, 0.0]))
    results = step(tf.constant([4.0, 0.0, 1.0, 1.0, 3.0]))
    assert numbers(results) == [3, 0.5, 1, 2, 3]


MIRRORED = """
import tensorflow as tf
from imagenet_fast import Config, make_strategy
from imagenet_fast.training.step.metric_sums import MetricSums, batch_sums

strategy = make_strategy(Config(logical_cpus=2))
assert strategy.num_replicas_in_sync == 2
with strategy.scope():
    totals = MetricSums()

def on_replica(logits, labels, weights):
    own = batch_sums(logits, tf.cast(labels, tf.float32), labels, weights)
    context = tf.distribute.get_replica_context()
    totals.add(context.all_reduce(tf.distribute.ReduceOp.SUM, own))
    return totals.results()

@tf.function
def step(*parts):
    return strategy.run(on_replica, parts)

def values(*parts):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )

def take_step():
    # The replicas' images differ: one right, one wrong and one unreadable; one second best.
    logits = values([[9., 1.], [9., 1.], [9., 1.]], [[1., 9.], [0., 0.], [0., 0.]])
    labels = values([0, 1, 0], [0, -1, -1])
    weights = values([1., 1., 0.], [1., 0., 0.])
    return strategy.experimental_local_results(
        tf.nest.map_structure(strategy.experimental_local_results, step(logits, labels, weights))
    )[0]

for steps in (1, 2, 3):
    results = take_step()
    expected = dict(loss=1 / 3, top1=1 / 3, top5=1., examples=3. * steps, skipped=1. * steps)
    for name, value in expected.items():
        for replica in (0, 1):
            tf.debugging.assert_near(results[name][replica], value)
        # Outside of the replicas too: the sum is not taken again.
        tf.debugging.assert_near(totals.results()[name], value)

totals.reset()
assert float(totals.results()["examples"]) == 0
results = take_step()
assert [float(value) for value in results["examples"]] == [3, 3]
"""


def test_under_two_replicas(run_python):
    run_python(["-c", MIRRORED])
