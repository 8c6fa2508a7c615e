"""Batch-norm groups from numbers of images."""

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.batch_norm_groups import (
    batch_norm_group_size,
    ghost_batch_size,
    images_together,
)


@pytest.mark.parametrize(
    ("images", "per_replica", "replicas", "size"),
    [
        # Ying et al. 2018 on 2048, 1024 and 512 cores.
        (128, 16, 2048, 8),
        (32, 32, 1024, 1),
        (64, 64, 512, 1),
        # Each replica alone.
        (0, 8, 16, 1),
        (4, 8, 16, 1),
        (8, 8, 16, 1),
        # Rounded down.
        (23, 8, 16, 2),
        # At most all.
        (1000, 8, 16, 16),
        (1000, 8, 12, 12),
        (1000, 8, 1, 1),
    ],
)
def test_group_size(images, per_replica, replicas, size):
    assert batch_norm_group_size(images, per_replica, replicas) == size


@pytest.mark.parametrize(
    ("images", "per_replica", "replicas", "message"),
    [
        (24, 8, 16, "groups of 3 replicas with 8 images each, .* 16 replicas .* try 16 or 32"),
        (40, 8, 12, "groups of 5 .* try 32 or 48"),
        (15, 3, 7, "groups of 5 .* try 3 or 21"),
    ],
)
def test_groups_that_do_not_divide_the_replicas(images, per_replica, replicas, message):
    with pytest.raises(UserError, match=f"batch_norm_batch_size {images} needs {message}"):
        batch_norm_group_size(images, per_replica, replicas)


@pytest.mark.parametrize(
    ("wanted", "per_replica", "expected"),
    [(0, 512, 0), (32, 512, 32), (512, 512, 0), (1024, 512, 0), (1, 3, 1)],
)
def test_parts_of_a_replicas_images(wanted, per_replica, expected):
    assert ghost_batch_size(wanted, per_replica) == expected


@pytest.mark.parametrize(
    ("wanted", "per_replica", "replicas", "expected"),
    [
        (0, 64, 8, 64),
        (32, 64, 8, 32),
        (128, 64, 8, 128),
        (100, 64, 8, 64),  # groups are rounded down
        (128, 64, 1, 64),  # and there are no more replicas
    ],
)
def test_images_together(wanted, per_replica, replicas, expected):
    assert images_together(wanted, per_replica, replicas) == expected


def test_ghost_batches_that_do_not_divide():
    with pytest.raises(UserError, match=r"does not divide the 512 images .* try 64 or 128"):
        ghost_batch_size(100, 512)
