"""Images in the devices' memory: order, augmentation and evaluation."""

import collections
import inspect
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from imagenet_fast import Config, UserError
from imagenet_fast.data import on_device
from imagenet_fast.data.augmentation.augment import augment, draw_changes
from imagenet_fast.data.dataset import distributed_dataset, make_images_on_device
from imagenet_fast.data.on_device import change, draw_in_groups, gather

IMAGES = 61
BATCH = 12
STEPS_PER_EPOCH = 5
UNREADABLE = 17


@pytest.fixture(scope="module")
def numbers(tmp_path_factory, write_data, numbered_examples, numbered_example):
    """61 images, one of them unreadable; an image's label is its number."""
    examples = list(numbered_examples)
    examples[UNREADABLE] = numbered_example(UNREADABLE, jpeg=b"no image")
    shards = [examples[:40], examples[40:]]
    folder = tmp_path_factory.mktemp("numbers")
    return write_data(folder, labels=IMAGES, train=shards, validation=[examples])


@pytest.fixture(scope="module")
def plain(numbers):
    """Changes nothing: an image can be told from its pixels."""
    return Config(
        data_dir=numbers,
        data_on_device=True,
        image_size=8,
        train_crop="none",
        flip=False,
        batch_size=BATCH,
        strategy="one_device",
        seed=5,
    )


def batches(config, steps, split="train", replicas=1):
    """Batches of all replicas, in order, as NumPy arrays."""
    config = config.replace(batch_size=config.batch_size // replicas)
    images = make_images_on_device(config, split)
    images._replicas = replicas
    for step in steps:
        parts = zip(*(images.batch(tf.constant(step, tf.int64), r) for r in range(replicas)))
        yield [np.concatenate(part) for part in parts]


def test_each_replica_reads_its_own_copy(plain):
    """As of workers with several GPUs, in the programs of their replicas."""
    images = make_images_on_device(plain, "train")
    ((pixels, labels, weights),) = images._copies
    images._copies.append([pixels, tf.Variable(-labels), weights])

    @tf.function
    def labels_of(number):
        _, found, _ = images.batch(tf.constant(0, tf.int64), tf.constant(number))
        return found

    assert [labels_of(number).numpy().min() >= 0 for number in (0, 1, 2, 3)] == [True, False] * 2


def numbers_of(config, steps):
    """The images' numbers; an unreadable one has no label of its own."""
    parts = [
        np.where(weights > 0, labels, UNREADABLE) for _, labels, weights in batches(config, steps)
    ]
    return np.concatenate(parts)


@pytest.mark.long
def test_progress_names_the_split(plain, capsys):
    config = plain.replace(image_size=9)  # as no other test, for which they would be held
    for split in ("train", "validation"):
        make_images_on_device(config, split)
        assert f"cache: reading {IMAGES} {split} images, 0 MB\n" in capsys.readouterr().err


# --- Which images


def test_epoch_has_each_image_once_without_a_partial_batch(plain):
    for epoch in range(3):
        first = epoch * STEPS_PER_EPOCH
        seen = numbers_of(plain, range(first, first + STEPS_PER_EPOCH))
        assert len(seen) == len(set(seen)) == STEPS_PER_EPOCH * BATCH


def test_order_differs_by_epoch_and_seed(plain):
    first = numbers_of(plain, range(5))
    for other in (numbers_of(plain, range(5, 10)), numbers_of(plain.replace(seed=6), range(5))):
        assert (first != other).mean() > 0.9
    np.testing.assert_array_equal(first, numbers_of(plain, range(5)))


@pytest.mark.long
def test_dropped_images_differ_by_epoch(plain):
    epochs = numbers_of(plain, range(20 * 5)).reshape(20, -1)
    left_out = set().union(*({*range(IMAGES)} - {*epoch} for epoch in epochs))
    assert len(left_out) > 10


def test_images_are_those_of_evaluation_with_their_labels(plain, evaluated):
    for images, labels, weights in batches(plain, range(5)):
        for image, label in zip(images[weights > 0], labels[weights > 0]):
            np.testing.assert_array_equal(image, evaluated[label])
    weights = np.concatenate([batch[2] for batch in batches(plain, range(40))])
    # In eight epochs of 60 of the 61 images.
    assert set(weights) == {0, 1} and 7 <= (weights == 0).sum() <= 8


@pytest.mark.parametrize("split", ["train", pytest.param("validation", marks=pytest.mark.long)])
def test_replicas_share_the_batch_of_one_device(plain, split):
    config = plain.replace(train_crop="pad", flip=True, cutout=3)
    for one, four in zip(batches(config, range(7), split), batches(config, range(7), split, 4)):
        for part, other in zip(one, four):
            np.testing.assert_array_equal(part, other)


def test_evaluation_sees_each_image_once_and_then_padding(plain, evaluated):
    seen = list(batches(plain, range(6), "validation"))
    images, labels, weights = (np.concatenate(parts) for parts in zip(*seen))
    readable = np.arange(IMAGES) != UNREADABLE
    np.testing.assert_array_equal(labels[:IMAGES][readable], np.arange(IMAGES)[readable])
    np.testing.assert_array_equal(images[:IMAGES][readable], evaluated[readable])
    np.testing.assert_array_equal(weights[:IMAGES], readable)
    assert set(labels[IMAGES:]) == {-1} and not weights[IMAGES:].any()


def test_dataset_yields_step_numbers(plain):
    training = iter(distributed_dataset(plain, "train", first_step=7))
    assert [int(next(training)["step"]) for _ in range(3)] == [7, 8, 9]
    assert [int(data["step"]) for data in distributed_dataset(plain, "validation")] == list(
        range(6)
    )


@pytest.mark.long
def test_batches_with_xla_are_the_same(plain):
    config = plain.replace(
        train_crop="pad", flip=True, cutout=3, augment_in_groups=True, brightness=0.5
    )
    images = make_images_on_device(config, "train")
    compiled = tf.function(lambda step: images.batch(step, 0), jit_compile=True)
    for step in (0, 8):
        step = tf.constant(step, tf.int64)
        for part, other in zip(images.batch(step, 0), compiled(step)):
            np.testing.assert_array_equal(part, other)


# --- What is done to them


def noise(count, size=9):
    return np.random.default_rng(1).integers(0, 256, (count, size, size, 3), np.uint8)


@pytest.mark.parametrize(
    "options",
    [
        {"train_crop": "none", "flip": True},
        {"train_crop": "none", "flip": False, "cutout": 4},
        {"train_crop": "pad", "flip": False, "crop_padding": 3},
        {"train_crop": "pad", "flip": True, "crop_padding": 8, "crop_border": "reflect"},
        {"train_crop": "pad", "flip": True, "crop_padding": 2, "cutout": 9},
        {"train_crop": "none", "flip": True, "cutout": 4, "brightness": 0.5, "contrast": 0.5},
    ],
)
def test_changes_equal_those_on_the_host(identities, options):
    config = Config(image_size=9, **options)
    images, changes = noise(200), draw_changes(identities(200), config)
    found = change(tf.constant(images), changes, config).numpy()
    for i, image in enumerate(images):
        own = {name: values[i] for name, values in changes.items()}
        np.testing.assert_array_equal(found[i], augment(tf.constant(image), own, config))
    assert (found != images).any()


def test_groups_are_near_equal_and_use_each_value():
    config = Config(image_size=32, train_crop="pad", cutout=8, seed=3)
    places, count = tf.range(1000, dtype=tf.int64), 1000
    changes = {k: v.numpy() for k, v in draw_in_groups(places, count, 4, config).items()}

    def sizes(name):
        return collections.Counter(map(tuple, changes[name].reshape(count, -1))).values()

    assert sorted(sizes("flip")) == [500, 500]
    assert len(sizes("shift")) == 81 and set(sizes("shift")) == {12, 13}
    # 25 x 25 places of a square of 8 are more than are used in an epoch.
    assert len(sizes("cut")) == 200 and set(sizes("cut")) == {5}
    assert changes["cut"].min() >= 0 and changes["cut"].max() <= 24


def test_groups_of_transformations_and_epochs_are_independent():
    config = Config(image_size=32, train_crop="pad", cutout=8, seed=3)
    places = tf.range(3000, dtype=tf.int64)
    drawn = [
        column
        for epoch in (4, 5)
        for values in draw_in_groups(places, 3000, epoch, config).values()
        for column in values.numpy().reshape(3000, -1).T.astype(float)
    ]
    correlations = np.corrcoef([*drawn, np.arange(3000)])
    assert np.abs(correlations - np.eye(len(correlations))).max() < 5 / np.sqrt(3000)


def test_alternating_flips_flip_each_image_every_second_epoch(plain, evaluated):
    config = plain.replace(flip=True, alternating_flip=True)
    mirrored = collections.defaultdict(list)
    for epoch in range(4):
        for images, labels, weights in batches(config, range(5 * epoch, 5 * epoch + 5)):
            for image, label in zip(images[weights > 0], labels[weights > 0]):
                flipped = (image == evaluated[label][:, ::-1]).all()
                assert flipped or (image == evaluated[label]).all()
                mirrored[label].append(bool(flipped) ^ (epoch % 2 == 1))
    assert all(len(set(flips)) == 1 for flips in mirrored.values())
    assert 15 < sum(flips[0] for flips in mirrored.values()) < 45


# --- What cannot be


def test_what_only_the_host_does_is_refused():
    def read_by(code):
        return set(re.findall(r"options\.(\w+)", inspect.getsource(code)))

    of_host = read_by(draw_changes) - read_by(on_device)
    assert {"lighting", "random_erasing", "rand_augment"} <= of_host
    for name in of_host:
        value = {bool: True, float: 0.1}.get(type(getattr(Config(), name)), (2, 9))
        with pytest.raises(UserError, match=f"{name}=.* cannot be used with data_on_device"):
            Config(data_on_device=True, train_crop="pad", **{name: value})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data_on_device": True}, "train_crop=random_resized crops whole images"),
        ({"alternating_flip": True}, "alternating_flip=true has no effect, because data_on"),
        ({"augment_in_groups": True}, "augment_in_groups=true has no effect, because data_"),
        ({"cutout": 225}, "cutout is 225, but must be at most image_size, 224"),
        (
            {"train_crop": "pad", "data_on_device": True, "lighting": 0.1},
            "lighting=0.1 cannot be used",
        ),
        (
            {"train_crop": "pad", "data_on_device": True, "cache": "encoded"},
            "cache=encoded cannot be used",
        ),
        (
            {"train_crop": "pad", "data_on_device": True, "alternating_flip": True, "flip": False},
            "contradicts --noflip",
        ),
    ],
)
def test_options_that_contradict(options, told):
    with pytest.raises(UserError, match=told):
        Config(**options)


def _types_on_gpus(operation, name):
    registered = kernels.get_registered_kernels_for_op(operation).kernel
    constraints = [
        own for kernel in registered if kernel.device_type == "GPU" for own in kernel.constraint
    ]
    return {
        kind for own in constraints if own.name == name for kind in own.allowed_values.list.type
    }


@pytest.mark.parametrize("dtype", [tf.uint8, tf.float16, tf.float32])
def test_gather_has_kernels_for_gpus(dtype):
    values = tf.cast(tf.range(256), dtype)[:, tf.newaxis]
    places = tf.constant([255, 0, 17])
    function = tf.function(gather).get_concrete_function(values, places)
    np.testing.assert_array_equal(function(values, places), values.numpy()[places.numpy()])
    used = [own for own in function.graph.get_operations() if own.type == "GatherV2"]
    on_gpus = _types_on_gpus("GatherV2", "Tparams")
    assert used and all(own.get_attr("Tparams").as_datatype_enum in on_gpus for own in used)


def test_variables_of_images_have_a_gather_on_gpus():
    assert tf.uint8.as_datatype_enum in _types_on_gpus("ResourceGather", "dtype")
