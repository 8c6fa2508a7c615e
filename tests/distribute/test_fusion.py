import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError, models
from imagenet_fast.base.keras_2 import name_of
from imagenet_fast.distribute.fusion import Fusion, creation_order, pack, unpack
from imagenet_fast.models.shape_only import shape_only


def buckets(fusion, elements, dtypes=None):
    return fusion.buckets([(n,) for n in elements], dtypes or [tf.float32] * len(elements))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, [(5, 4, 3, 2, 1, 0)]),
        (1, [(5,), (4,), (3,), (2,), (1,), (0,)]),
        (40, [(5, 4, 3), (2,), (1, 0)]),  # 2 is larger than that, 5 to 3 are just as large.
        (44, [(5, 4, 3), (2,), (1, 0)]),
        (52, [(5, 4, 3), (2,), (1, 0)]),
        (120, [(5, 4, 3, 2), (1, 0)]),
        (10**9, [(5, 4, 3, 2, 1, 0)]),
    ],
)
def test_by_bytes(limit, expected):
    assert buckets(Fusion(limit), [4, 4, 20, 2, 4, 4]) == expected


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ((2,), [(4, 3, 2), (1, 0)]),
        ((1, 4), [(4,), (3, 2, 1), (0,)]),
        ((4,), [(4,), (3, 2, 1, 0)]),
    ],
)
def test_by_segments_whatever_the_bytes(segments, expected):
    assert buckets(Fusion(4, segments), [1] * 5) == expected


def test_one_dtype_a_bucket():
    dtypes = [tf.float32, tf.float16, tf.float32, tf.float16]
    assert buckets(Fusion(0), [1] * 4, dtypes) == [(3, 1), (2, 0)]
    assert buckets(Fusion(segments=(3,)), [1] * 4, dtypes) == [(3,), (1,), (2, 0)]


def test_bytes_depend_on_the_dtype():
    assert buckets(Fusion(4), [1, 1, 1], [tf.float16] * 3) == [(2, 1), (0,)]


def test_a_bucket_comes_before_those_that_wait_for_longer():
    dtypes = [tf.float32, tf.float16, tf.float16, tf.float32]
    assert buckets(Fusion(0), [1] * 4, dtypes) == [(2, 1), (3, 0)]


@pytest.mark.parametrize("segments", [(0,), (-1,), (3, 3), (4, 2)])
def test_segments_must_increase(segments):
    with pytest.raises(UserError, match="must be positive and increasing"):
        Fusion(segments=segments)


@pytest.mark.parametrize("segments", [(5,), (2, 9)])
def test_segments_out_of_range(segments):
    with pytest.raises(UserError, match="there are 5 gradients, so the last number can be at most"):
        buckets(Fusion(segments=segments), [1] * 5)


def test_packed_and_unpacked():
    tensors = [tf.constant([[1, 2], [3, 4]]), tf.constant(5), tf.constant([6])]
    packed = pack(tensors, multiple=4)
    assert packed.numpy().tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert pack(tensors, multiple=3).shape == [6]
    again = unpack(packed, [tensor.shape for tensor in tensors])
    for before, after in zip(tensors, again):
        np.testing.assert_array_equal(before, after)
        assert before.shape == after.shape


def test_order_of_creation_and_not_of_the_list():
    one, two, three = (tf.Variable(0.0, name="same_9") for _ in range(3))
    assert creation_order([three, one, two]) == [1, 2, 0]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_order_of_a_model_whose_list_differs(policy):
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        images = keras.Input((4,))
        shortcut = keras.layers.Dense(3, name="projection")(images)
        x = keras.layers.Dense(3, name="second")(keras.layers.Dense(3, name="first")(images))
        model = keras.Model(images, keras.layers.Add()([shortcut, x]))
    finally:
        keras.mixed_precision.set_global_policy(before)
    variables = model.trainable_variables
    found = [name_of(variables[i]).split("/")[0] for i in creation_order(variables)]
    assert found == ["projection"] * 2 + ["first"] * 2 + ["second"] * 2
    assert [name_of(v).split("/")[0] for v in variables] != found


@pytest.mark.parametrize(
    ("model", "size", "boundary", "parameters"),
    [
        # Jia et al. 2018 cut ResNet-50 between "layers" 76 and 77, and AlexNet between 20 and 21:
        # its convolutions and their batch norms, and what is fully connected.
        ("resnet50", 224, 76, (2_102_336, 23_454_696)),
        ("alexnet_bn", 227, 20, (3_747_200 + 2_752, 58_631_144)),
    ],
)
def test_published_segments(model, size, boundary, parameters):
    with shape_only():
        network = models.build(model, 1000, (size, size, 3))
    variables = network.trainable_variables
    shapes = [variables[i].shape for i in creation_order(variables)]
    last, first = Fusion(segments=(boundary,)).buckets(shapes, [tf.float32] * len(shapes))
    counts = [sum(shapes[i].num_elements() for i in bucket) for bucket in (first, last)]
    assert tuple(counts) == parameters
    assert len(first) == boundary
