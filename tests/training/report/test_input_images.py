"""Input images: training images, made as training makes them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.data.dataset import make_dataset
from imagenet_fast.data.info import read_info
from imagenet_fast.training.report import input_images
from imagenet_fast.training.report.input_images import make_input_images
from imagenet_fast.training.run import Run
from imagenet_fast.training.step.mix import Mixer


@pytest.fixture(scope="module")
def config(digits):
    return Config(
        data_dir=digits,
        model="resnet8",
        image_size=16,
        train_crop="none",
        flip=False,
        batch_size=32,
        strategy="one_device",
    )


def images_of(config, mixer, step):
    return make_input_images(Run(config, read_info(config), None), mixer, step)


@pytest.fixture(scope="module")
def plain(config):
    return images_of(config, None, step=0)


@pytest.mark.long
def test_training_images_with_their_classes(config, plain):
    known = set()
    for images, labels, _ in make_dataset(config, "train"):
        known |= {(i.tobytes(), int(n)) for i, n in zip(images.numpy(), labels.numpy())}
        if len(known) >= 1400:  # All but a few, which are in no whole batch.
            break
    shown = {(i.tobytes(), int(n)) for i, n in zip(plain.images, plain.labels)}
    assert len(shown) == 32
    assert len(shown & known) >= 30
    assert len(set(plain.labels.tolist())) > 5
    assert (plain.shares == 1).all()


def test_input_images_are_augmented_as_in_training(config, plain):
    changed = images_of(config.replace(flip=True), None, step=0)
    np.testing.assert_array_equal(changed.labels, plain.labels)
    mirrored = [(new == old[:, ::-1]).all() for new, old in zip(changed.images, plain.images)]
    same = [(new == old).all() for new, old in zip(changed.images, plain.images)]
    assert all(a or b for a, b in zip(mirrored, same))
    assert sum(mirrored) > 5
    assert sum(same) > 5


@pytest.mark.long
@pytest.mark.parametrize("cache", ["encoded", "decoded"])
def test_input_images_fill_no_cache(config, plain, cache, monkeypatch):
    def fill(*arguments):
        raise AssertionError

    monkeypatch.setattr("imagenet_fast.data.dataset.records_from_memory", fill)
    monkeypatch.setattr("imagenet_fast.data.dataset.batches_from_memory", fill)
    cached = images_of(config.replace(cache=cache), None, step=0)
    np.testing.assert_array_equal(cached.images, plain.images)


@pytest.mark.long
def test_mixed_images_are_those_of_the_mixer(config, plain):
    mixer = Mixer(1.0, 0.0, config.seed)
    mixed = images_of(config, mixer, step=3)
    np.testing.assert_array_equal(mixed.labels, plain.labels)
    np.testing.assert_array_equal(mixed.partners, plain.labels[::-1])
    assert 0 < mixed.shares.min() < mixed.shares.max() < 1
    shares = mixed.shares[:, None, None, None]
    expected = shares * plain.images + (1 - shares) * plain.images[::-1]
    np.testing.assert_allclose(mixed.images, expected, atol=0.51)


@pytest.mark.long
def test_progressive_resizing(config):
    growing = config.replace(train_sizes=(8, 12), train_until="3 steps,8 steps")
    sizes = [images_of(growing, None, step).images.shape[1:3] for step in (5, 8)]
    assert sizes == [(12, 12), (16, 16)]


def test_images_that_cannot_be_read_are_left_out(config, monkeypatch):
    images = np.arange(4 * 16 * 16 * 3, dtype=np.uint8).reshape(4, 16, 16, 3)
    batch = tf.constant(images), tf.constant([5, 6, 7, 8]), tf.constant([1.0, 0.0, 1.0, 1.0])
    monkeypatch.setattr(
        input_images, "training_batches", lambda *_: tf.data.Dataset.from_tensors(batch)
    )
    found = images_of(config, None, step=0)
    assert found.labels.tolist() == [5, 7, 8]
    np.testing.assert_array_equal(found.images, images[[0, 2, 3]])


@pytest.mark.long
def test_global_random_numbers_are_unchanged(config):
    keras.utils.set_random_seed(3)
    expected = tf.random.uniform([4]).numpy(), np.random.rand(4)
    keras.utils.set_random_seed(3)
    images_of(config, Mixer(1.0, 1.0, 0), step=0)
    np.testing.assert_array_equal(tf.random.uniform([4]).numpy(), expected[0])
    np.testing.assert_array_equal(np.random.rand(4), expected[1])
