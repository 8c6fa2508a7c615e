"""A batch in parts, against ``np.array_split``."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.pipeline_parallel.micro_batches import MicroBatches, check_batch, check_outputs

SIZES = [(1, 1), (6, 1), (6, 3), (7, 3), (13, 8), (8, 8)]
FEW = [(6, 3), (7, 3)]


def rows(count, width=2):
    return np.arange(count * width, dtype="float32").reshape(count, width)


def check(inputs, targets, fractions, count):
    """That all of the parts are right, as they were computed."""
    expected = np.array_split(rows(len(np.concatenate(inputs))), count)
    assert [len(own) for own in inputs] == [len(own) for own in expected]
    for found in (inputs, targets):
        for own, part in zip(found, expected):
            np.testing.assert_array_equal(own, part)
    np.testing.assert_allclose(
        fractions, [len(own) / sum(map(len, expected)) for own in expected], rtol=1e-6
    )


@pytest.mark.parametrize(("examples", "count"), SIZES)
def test_parts_of_a_batch_of_a_known_size(examples, count):
    batch = MicroBatches(tf.constant(rows(examples)), tf.constant(rows(examples)), count)
    numbers = range(count)
    check(
        [batch.inputs(number).numpy() for number in numbers],
        [batch.targets(number).numpy() for number in numbers],
        [batch.fraction(number) for number in numbers],
        count,
    )
    assert isinstance(batch.fraction(0), float)
    assert (batch.examples, batch.count) == (examples, count)


@pytest.mark.parametrize(
    ("examples", "count"),
    [pytest.param(*size, marks=() if size in FEW else pytest.mark.long) for size in SIZES],
)
@pytest.mark.parametrize("known", ["size", "number", "neither"])
def test_parts_in_a_graph(examples, count, known):
    """With the number in a loop's tensor, a size that is told when the program runs, or both."""

    size = examples if known == "size" else None

    @tf.function(input_signature=[tf.TensorSpec([size, 2]), tf.TensorSpec([count], tf.int32)])
    def split(values, numbers):
        batch = MicroBatches(values, values, count)
        found = []
        for number in range(count):
            own = number if known == "number" else numbers[number]
            found.append((batch.inputs(own), batch.targets(own), batch.fraction(own)))
            assert found[-1][2].dtype == tf.float32
            if known == "size" and examples % count == 0:
                assert found[-1][0].shape == (examples // count, 2)
            else:
                assert found[-1][0].shape[1:] == (2,)
        return found

    inputs, targets, fractions = zip(*split(rows(examples), np.arange(count, dtype=np.int32)))
    check([own.numpy() for own in inputs], [own.numpy() for own in targets], fractions, count)


def test_what_describes_a_part():
    images, labels = tf.zeros([6, 4, 4, 3]), tf.zeros([6], tf.int64)
    inputs, targets = MicroBatches({"images": images}, (labels,), 3).specs
    assert inputs == {"images": tf.TensorSpec([2, 4, 4, 3])}
    assert targets == (tf.TensorSpec([2], tf.int64),)
    # Not of one size: one program serves all parts.
    assert MicroBatches(images, labels, 4).size is None
    assert MicroBatches(images, labels, 4).specs[0] == tf.TensorSpec([None, 4, 4, 3])


def test_structures():
    values = tf.constant(rows(5))
    batch = MicroBatches({"a": values, "b": (values[:, 0],)}, (), 2)
    part = batch.inputs(1)
    np.testing.assert_array_equal(part["a"], rows(5)[3:])
    np.testing.assert_array_equal(part["b"][0], rows(5)[3:, 0])
    assert batch.targets(1) == ()


def test_fewer_examples_than_micro_batches():
    """One micro-batch each."""
    batch = MicroBatches(tf.constant(rows(3)), (), 4)
    assert batch.count == 3
    np.testing.assert_array_equal([batch.inputs(n)[0] for n in range(3)], rows(3))


def test_fewer_examples_than_micro_batches_where_the_size_is_not_known():
    """The others repeat the last one, and count for nothing."""

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def split(values):
        batch = MicroBatches(values, (), 4)
        assert batch.count == 4
        parts = [batch.inputs(number) for number in range(4)]
        gradients = [batch.gradient(values, number) for number in range(4)]
        fractions = [batch.fraction(number) for number in range(4)]
        return parts, gradients, fractions, batch.joined(tf.concat(parts, axis=0))

    parts, gradients, fractions, joined = split(rows(3))
    np.testing.assert_array_equal(np.concatenate(parts), rows(3)[[0, 1, 2, 2]])
    np.testing.assert_array_equal(np.concatenate(gradients), [*rows(3), [0, 0]])
    np.testing.assert_allclose(fractions, [1 / 3] * 3 + [0])
    np.testing.assert_array_equal(joined, rows(3))


@pytest.mark.parametrize("known", [True, False])
def test_outputs_whose_first_dimension_is_not_the_batch(known):
    @tf.function(input_signature=[tf.TensorSpec([5 if known else None, 2])])
    def join(values):
        batch = MicroBatches(values, (), 2)
        parts = [tf.reshape(batch.inputs(number), [-1, 1]) for number in range(2)]
        return batch.joined(tf.concat(parts, axis=0))

    kind = UserError if known else tf.errors.InvalidArgumentError
    with pytest.raises(
        kind, match=r"the first dimension of an output is not the batch.*\b10\b.*\b5\b"
    ):
        join(rows(5))


def test_scalar_outputs():
    check_outputs({"a": tf.TensorSpec([None])})
    with pytest.raises(UserError, match=r"the first dimension of an output.*it is a scalar"):
        check_outputs((tf.TensorSpec([None]), tf.TensorSpec([])))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tf.ragged.constant([[1.0], []]), "ragged images: pad them with to_tensor"),
        (tf.RaggedTensorSpec([None, None]), "ragged images"),
        (tf.sparse.from_dense([[0.0, 1.0]]), "sparse images: use tf.sparse.to_dense"),
        (tf.SparseTensorSpec([None, 2]), "sparse images"),
        (tf.TensorSpec(None), "images of unknown shape: use tf.ensure_shape"),
        (tf.constant(3), "images without dimensions"),
        (None, "images without dimensions, such as None"),
    ],
)
def test_batches_that_cannot_be_split(value, message):
    check_batch("images", (tf.zeros([2]), keras.Input([None])))
    with pytest.raises(UserError, match=f"cannot split into micro-batches {message}"):
        check_batch("images", {"a": tf.zeros([2]), "b": value})
