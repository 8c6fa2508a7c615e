import io
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from imagenet_fast import Config
from imagenet_fast.data import batches as batching
from imagenet_fast.data.augmentation.augment import augment, draw_changes
from imagenet_fast.data.augmentation.crop_boxes import training_crop_boxes
from imagenet_fast.data.batches import (
    evaluation_batches,
    native_images,
    plan_training,
    training_batches,
    unreadable,
)
from imagenet_fast.data.decode import decode_crop_and_resize, evaluation_image
from imagenet_fast.data.examples import ENCODED, HEIGHT, JPEG_INDEX, WIDTH, decode_example
from imagenet_fast.data.info import DatasetInfo

CLASSES = 61
INFO = DatasetInfo("numbers", tuple(map(str, range(CLASSES))), 0, {})
# What makes the most of an image's identity.
RANDOM = Config(image_size=8, color_jitter=0.4, lighting=0.1)
# Without colours, which take long to trace.
CROPPED = Config(image_size=8)
PLAIN = Config(image_size=8, train_crop="none", flip=False)
# As cropped, but all of the image is decoded: a crop may lie in the decodable part of half a JPEG.
SHIFTED = CROPPED.replace(train_crop="pad")


def read(dataset, optimized=True):
    """Returns (images, labels, weights) of all batches, joined."""
    # TensorFlow's optimizer fuses map and batch, which changes what comes after an error.
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = optimized
    parts = zip(*dataset.with_options(options).as_numpy_iterator())
    return tuple(np.concatenate(part) for part in parts)


@pytest.fixture(scope="module")
def train(identities):
    """Training images of examples in their order: train(examples, config, batch_size=8, ...)."""

    def read_training(examples, config, batch_size=8, threads=2, optimized=True, info=INFO):
        order = tf.data.Dataset.from_tensor_slices((examples, identities(len(examples))))
        order = order.batch(batch_size)
        return read(training_batches(order, info, config, threads), optimized)

    return read_training


def evaluate(examples, config=PLAIN, batch_size=8, threads=2, optimized=True, info=INFO):
    records = tf.data.Dataset.from_tensor_slices(examples).batch(batch_size)
    return read(evaluation_batches(records, info, config, threads), optimized)


@pytest.fixture(scope="module")
def trained(train, numbered_examples):
    """What training sees of the numbered examples."""
    return train(numbered_examples, CROPPED)


def with_size(example, height, width):
    """Returns the example with other fields for the size; None leaves a field out."""
    parsed = tf.train.Example.FromString(example)
    for name, value in ((HEIGHT, height), (WIDTH, width)):
        del parsed.features.feature[name]
        if value is not None:
            parsed.features.feature[name].int64_list.value.append(value)
    return parsed.SerializeToString()


def assert_same(one, other):
    for part, other_part in zip(one, other):
        np.testing.assert_array_equal(part, other_part)


# --- Good images ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.long), 61])
def test_training_images_depend_on_records_and_identities(
    train, numbered_examples, identities, batch_size
):
    images, labels, weights = train(numbered_examples, RANDOM, batch_size)
    np.testing.assert_array_equal(labels, range(CLASSES))
    assert (weights == 1).all()
    boxes = training_crop_boxes(tf.constant([[12, 10]] * CLASSES), identities(CLASSES), RANDOM)
    changes = draw_changes(identities(CLASSES), RANDOM)
    for number, example in enumerate(numbered_examples):
        encoded = decode_example(example)[ENCODED][0]
        own = {name: change[number] for name, change in changes.items()}
        image = augment(decode_crop_and_resize(encoded, boxes[number], RANDOM), own, RANDOM)
        np.testing.assert_array_equal(images[number], image)
    assert len({image.tobytes() for image in images}) == CLASSES


def test_batches_are_as_documented(numbered_examples, identities):
    order = tf.data.Dataset.from_tensor_slices((numbered_examples, identities(CLASSES)))
    for batches, size in (
        (training_batches(order.batch(4, drop_remainder=True), INFO, PLAIN, 2), 4),
        (evaluation_batches(order.map(lambda r, _: r).batch(4), INFO, PLAIN, 2), None),
    ):
        assert batches.element_spec == (
            tf.TensorSpec([size, 8, 8, 3], tf.uint8),
            tf.TensorSpec([size], tf.int32),
            tf.TensorSpec([size], tf.float32),
        )
        assert next(iter(batches))[0].shape == (4, 8, 8, 3)


@pytest.mark.parametrize(
    "batch_size",
    [pytest.param(1, marks=pytest.mark.long), 8, pytest.param(100, marks=pytest.mark.long)],
)
def test_evaluation_sees_the_centre(numbered_examples, evaluated, batch_size):
    images, labels, weights = evaluate(numbered_examples, batch_size=batch_size)
    np.testing.assert_array_equal(images, evaluated)
    np.testing.assert_array_equal(labels, range(CLASSES))
    assert (weights == 1).all()


def test_evaluation_is_deterministic(numbered_examples, evaluated):
    np.testing.assert_array_equal(evaluate(numbered_examples, RANDOM)[0], evaluated)


@pytest.mark.long
def test_images_do_not_depend_on_threads_and_batches(train, trained, numbered_examples):
    assert_same(train(numbered_examples, CROPPED, batch_size=5, threads=7), trained)


@pytest.mark.long
@pytest.mark.usefixtures("native_ops")
def test_images_are_traced_once(train, numbered_examples, monkeypatch):
    """For whole batches, for images one by one, and for pipelines with the same images."""
    traced = []
    monkeypatch.setattr(batching, "native_images", lambda *a: traced.append(1) or native_images(*a))
    config = SHIFTED.replace(image_size=9, resize_kernel="native")
    few = numbered_examples[:6]
    images, _, _ = train(few, config, batch_size=3)
    again, _, _ = train(few, config.replace(seed=7, model_dir="elsewhere"), batch_size=2)
    assert len(traced) == 1
    np.testing.assert_array_equal(images, again)
    keras.backend.clear_session()  # which forgets the Python functions of a graph
    np.testing.assert_array_equal(images, train(few, config)[0])
    assert len(traced) == 2


@pytest.mark.long
def test_evaluation_reads_what_serving_reads(numbered_example):
    """Each checked by its header: a large PNG and a GIF keep their places, and do not count."""
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (12, 10, 3)).astype(np.uint8))

    def encode(image, format):
        file = io.BytesIO()
        image.save(file, format)
        return file.getvalue()

    cmyk = encode(image.convert("CMYK"), "JPEG")
    start = cmyk.index(b"\xff\xee\x00\x0eAdobe")
    unmarked = cmyk[:start] + cmyk[start + 16 :]
    large = encode(image.resize((10, 13)), "PNG")
    files = [encode(image, "PNG"), large, cmyk, unmarked, encode(image, "GIF")]
    examples = [numbered_example(number, file) for number, file in enumerate(files)]
    config = PLAIN.replace(max_pixels=120)
    images, _, weights = evaluate(examples, config)
    np.testing.assert_array_equal(weights, [1, 0, 1, 1, 0])
    for place in (0, 2, 3):
        np.testing.assert_array_equal(images[place], evaluation_image(files[place], config))
    np.testing.assert_array_equal(images[2], images[3])
    assert evaluate(examples[1:2])[2] == 1


def test_label_offset(train, numbered_examples):
    info = DatasetInfo("numbers", INFO.labels, -3, {})
    for images, labels, weights in (
        train(numbered_examples, PLAIN, info=info),
        evaluate(numbered_examples, info=info),
    ):
        # The first three have no class.
        np.testing.assert_array_equal(weights, [*[0] * 3, *[1] * 58])
        np.testing.assert_array_equal(labels, [*[0] * 3, *range(58)])
        assert not images[:3].any() and images[3:].any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("kernel", ["native", "tensorflow"])
def test_several_labels(train, numbered_example, kernel):
    """Repeated ones count once; a label out of range makes an image unreadable."""
    labels = [(3, 5), (), (5, 3, 5), (2,), (4, 7)]
    examples = [numbered_example(n, label=own) for n, own in enumerate(labels)]
    info = DatasetInfo("numbers", tuple("abcd"), -2, {}, multi_label=True)
    expected = [[0, 1, 0, 1], [0] * 4, [0, 1, 0, 1], [1, 0, 0, 0], [0] * 4]
    config = PLAIN.replace(resize_kernel=kernel)
    for images, found, weights in (
        train(examples, config, info=info),
        evaluate(examples, config, info=info),
    ):
        assert found.dtype == np.int32 and found.tolist() == expected
        assert weights.tolist() == [1, 1, 1, 1, 0] and images[:4].any(axis=(1, 2, 3)).all()


# --- Sizes in the records -------------------------------------------------------------------------

MISSING = (None, None)
NOT_TOLD = (MISSING, (12, None), (0, 0), (0, 10), (-12, 10))
# No box of such an image lies in the one that there is.
TOO_LARGE = (1200, 1000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "each"),
    [
        pytest.param([MISSING], 1, marks=pytest.mark.long),
        pytest.param(NOT_TOLD, 1, marks=pytest.mark.long),
        (NOT_TOLD, 3),
        pytest.param([TOO_LARGE], 4, marks=pytest.mark.long),
    ],
)
def test_sizes_missing_in_records_are_read_from_images(
    train, trained, numbered_examples, sizes, each
):
    examples = list(numbered_examples)
    for number, size in zip(range(0, CLASSES, each), itertools.cycle(sizes)):
        examples[number] = with_size(examples[number], *size)
    assert_same(train(examples, CROPPED), trained)


def test_crops_are_drawn_from_the_sizes_in_the_records(train, trained, numbered_examples):
    # Else headers would be read for nothing. All boxes of smaller images lie in larger ones.
    examples = [with_size(example, 6, 5) for example in numbered_examples]
    images, _, weights = train(examples, CROPPED)
    assert (weights == 1).all()
    assert (images != trained[0]).any(axis=(1, 2, 3)).mean() > 0.9


@pytest.mark.parametrize(
    "sizes", [pytest.param(NOT_TOLD, marks=pytest.mark.long), [(6, 5), TOO_LARGE, *NOT_TOLD]]
)
def test_evaluation_ignores_sizes_in_records(numbered_examples, evaluated, sizes):
    sizes = itertools.cycle(sizes)
    examples = [with_size(example, *size) for example, size in zip(numbered_examples, sizes)]
    images, _, weights = evaluate(examples)
    np.testing.assert_array_equal(images, evaluated)
    assert (weights == 1).all()


# --- Bad images -----------------------------------------------------------------------------------

BATCHES = pytest.mark.parametrize(
    ("batch_size", "optimized"),
    [
        pytest.param(1, True, marks=pytest.mark.long),
        (8, True),
        pytest.param(8, False, marks=pytest.mark.long),
        pytest.param(61, True, marks=pytest.mark.long),
    ],
)


def assert_only_bad_are_lost(batches, bad, expected):
    images, labels, weights = batches
    lost = np.isin(np.arange(CLASSES), bad)
    np.testing.assert_array_equal(weights, ~lost)
    np.testing.assert_array_equal(labels, np.where(lost, 0, np.arange(CLASSES)))
    np.testing.assert_array_equal(images[~lost], expected[~lost])
    assert not images[lost].any()


@pytest.mark.long
@BATCHES
def test_unreadable_images_keep_their_places_in_evaluation(
    bad_examples, evaluated, batch_size, optimized
):
    examples, bad = bad_examples
    batches = evaluate(examples, batch_size=batch_size, optimized=optimized)
    assert_only_bad_are_lost(batches, bad, evaluated)


@pytest.fixture(scope="module")
def shifted(train, numbered_examples):
    """All numbered images as SHIFTED has them."""
    return train(numbered_examples, SHIFTED)[0]


@BATCHES
def test_unreadable_images_keep_their_places_in_training(
    train, bad_examples, shifted, batch_size, optimized
):
    examples, bad = bad_examples
    batches = train(examples, SHIFTED, batch_size, optimized=optimized)
    assert_only_bad_are_lost(batches, bad, shifted)


@pytest.mark.long
def test_unreadable_images_change_no_crop_of_their_batch(train, trained, bad_examples):
    examples, bad = bad_examples
    images, labels, weights = train(examples, CROPPED)
    good = ~np.isin(np.arange(CLASSES), bad)
    assert_same((images[good], labels[good], weights[good]), [part[good] for part in trained])


@pytest.mark.parametrize("unused", [{"jpeg_index": False}, {"resize_kernel": "tensorflow"}])
def test_unused_indexes_are_not_even_parsed(numbered_example, unused):
    example = tf.train.Example.FromString(numbered_example(7))
    example.features.feature[JPEG_INDEX].int64_list.value.append(3)  # the wrong type
    options = Config(resize_kernel="native").replace(**unused)
    keys = tf.zeros([1, 3], tf.int64)
    plan = plan_training(
        tf.constant([example.SerializeToString()]), keys, info=INFO, options=options
    )
    assert plan.labels.numpy() == [7]


@pytest.mark.long
def test_batches_of_unreadable_images_only(train):
    images, labels, weights = train([b""] * 5, CROPPED, batch_size=2)
    assert images.shape == (5, 8, 8, 3)
    assert not images.any() and not labels.any() and not weights.any()


def test_unreadable_is_black_and_does_not_count():
    image, label, weight = unreadable(Config(image_size=5), label=-1)
    assert (image.shape, image.dtype) == ((5, 5, 3), tf.uint8) and not image.numpy().any()
    assert (label.numpy(), label.dtype) == (-1, tf.int32)
    assert (weight.numpy(), weight.dtype) == (0, tf.float32)
