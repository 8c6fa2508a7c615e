import itertools

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError
from imagenet_fast.data.info import SplitInfo
from imagenet_fast.data.order import (
    Share,
    is_by_files,
    part_of,
    part_reader,
    shares_of,
    training_order,
)

COUNTS = (23, 9, 17, 8, 4)  # 61 records, numbered from 0
NUMBERS = sum(COUNTS)
LARGE = 2**30


def split_of(counts=COUNTS, bytes=0):
    paths = tuple(f"shard {index}" for index in range(len(counts)))
    return SplitInfo(paths, tuple(counts), bytes, sum(counts))


def read_numbers(path, count, start):
    """Stands for a reader of files: a record is its number."""
    return tf.data.Dataset.range(start, start + count)


def read_in_split(path, count, start):
    """The same for parts without all shards."""
    starts = tf.cumsum(tf.constant(COUNTS, tf.int64), exclusive=True)
    start = starts[tf.strings.to_number(tf.strings.split(path)[1], tf.int32)]
    return tf.data.Dataset.range(start, start + count)


def orders(batches, *, batch_size, pipelines=1, replicas=1, first_step=0, threads=2, **config):
    """Returns each host's first batches: (numbers [batches, images], identities)."""
    config = Config(batch_size=batch_size, **config)
    streams = []
    for host in range(pipelines):
        size = batch_size // pipelines // replicas
        (share,) = shares_of(split_of(), config, size, pipelines, host)
        streams.append(order_of_share(share, batches, config, first_step, threads))
    return streams


def order_of_share(share, batches, config, first_step=0, threads=2):
    """Returns the same of a share."""
    dataset = training_order(
        share,
        read_in_split,
        config,
        steps_per_epoch=NUMBERS // config.batch_size,
        first_step=first_step,
        threads=threads,
    )
    parts = zip(*dataset.take(batches).as_numpy_iterator())
    return tuple(np.stack(part) for part in parts)


def order(batches, **options):
    """Returns the same of the only pipeline."""
    (stream,) = orders(batches, **options)
    return stream


def assert_same(one, other):
    for part, other_part in zip(one, other):
        np.testing.assert_array_equal(part, other_part)


# --- An epoch -------------------------------------------------------------------------------------


def test_each_epoch_has_each_record_once_in_a_new_order():
    numbers, _ = order(28, batch_size=8)  # 7 an epoch
    epochs = numbers.reshape(4, 56)
    for epoch in epochs:
        assert len(set(epoch)) == 56
        assert not (np.diff(epoch) == 1).sum() > 10  # not in order
    for one, other in itertools.combinations(epochs, 2):
        assert (one == other).mean() < 0.2
    # What did not fill a batch is not always the same.
    assert set(numbers.flat) == set(range(NUMBERS))


def test_batches_are_as_documented():
    config = Config()
    dataset = training_order(
        Share(part_of(split_of(), config, 1, 0), 8, 8, (0, 1)),
        read_numbers,
        config,
        steps_per_epoch=7,
        first_step=0,
        threads=1,
    )
    specs = tf.TensorSpec([8], tf.int64), tf.TensorSpec([8, 3], tf.int64)
    assert dataset.element_spec == specs


def test_identities_are_seed_epoch_and_place():
    _, identities = order(16, batch_size=8, seed=3)
    assert identities.dtype == np.int64
    identities = identities.reshape(128, 3)
    assert (identities[:, 0] == 3).all()
    np.testing.assert_array_equal(identities[:, 1], np.repeat([0, 1, 2], [56, 56, 16]))
    np.testing.assert_array_equal(identities[:, 2], [*range(56), *range(56), *range(16)])


@pytest.mark.parametrize("buffer", [1, 4, 61, 1000])
def test_shuffle_buffers_of_any_size_lose_no_record(buffer):
    numbers, _ = order(2, batch_size=61, shuffle_buffer=buffer)
    for epoch in numbers:
        assert sorted(epoch) == list(range(NUMBERS))
    assert (numbers[0] != numbers[1]).any()


def test_shards_are_shuffled_anew_each_epoch():
    # Without a buffer only their order is random.
    numbers, _ = order(6, batch_size=61, shuffle_buffer=1)
    assert len({tuple(epoch) for epoch in numbers}) > 3


# --- Where it continues ---------------------------------------------------------------------------


# In the first epoch and over its end; at the second one's start; in the second; much later.
@pytest.mark.parametrize(
    "first_step",
    [
        pytest.param(1, marks=pytest.mark.long),
        5,
        pytest.param(7, marks=pytest.mark.long),
        pytest.param(11, marks=pytest.mark.long),
        pytest.param(2000, marks=pytest.mark.long),
    ],
)
def test_resumed_order_continues_the_uninterrupted_one(first_step):
    epoch = first_step // 7
    whole = order(21, batch_size=8, seed=3, first_step=7 * epoch)
    tf.random.set_seed(first_step)
    tf.random.uniform([3])
    resumed = order(9, batch_size=8, seed=3, first_step=first_step)
    skipped = first_step - 7 * epoch
    assert_same(resumed, [part[skipped : skipped + 9] for part in whole])


def test_epochs_do_not_depend_on_the_first_epoch():
    numbers, identities = order(21, batch_size=8)
    later = order(7, batch_size=8, first_step=14)
    assert_same(later, (numbers[14:], identities[14:]))
    assert (later[1][..., 1] == 2).all()


@pytest.mark.parametrize(
    "threads", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 5]
)
def test_order_does_not_depend_on_threads_nor_tensorflows_seed(threads):
    expected = order(16, batch_size=8, seed=3, threads=3)
    tf.random.set_seed(threads)
    assert_same(order(16, batch_size=8, seed=3, threads=threads), expected)


def test_order_differs_by_seed_and_epoch():
    streams = {seed: order(14, batch_size=8, seed=seed)[0].reshape(2, 56) for seed in (0, 1, 2)}
    streams[2**32 - 1] = order(14, batch_size=8, seed=2**32 - 1)[0].reshape(2, 56)
    epochs = [epoch for stream in streams.values() for epoch in stream]
    for one, other in itertools.combinations(epochs, 2):
        assert (one == other).mean() < 0.2


def test_identities_of_the_largest_seed():
    _, identities = order(1, batch_size=8, seed=2**32 - 1)
    assert (identities[..., 0] == 2**32 - 1).all()


# --- Several pipelines ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pipelines",
    [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("shard_by", [pytest.param("records", marks=pytest.mark.long), "auto"])
def test_hosts_take_equal_parts_of_each_step_in_one_global_order(pipelines, shard_by):
    options = {"batch_size": 12, "shuffle_buffer": 20, "first_step": 3}
    # Five steps an epoch: from the middle of the first one to that of the third.
    numbers, identities = order(10, **options)
    streams = orders(10, pipelines=pipelines, shard_by=shard_by, **options)
    for own, _ in streams:
        assert own.shape == (10, 12 // pipelines)
    together = [np.concatenate(parts, axis=1) for parts in zip(*streams)]
    assert_same(together, (numbers, identities))


@pytest.mark.parametrize("hosts", [1, 2, 3, 6])
@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_images_of_a_step_do_not_depend_on_the_number_of_hosts(hosts, pipelines):
    """Also where pipelines have shards of their own, whose number the run's replicas tell."""
    steps, config = 8, Config(batch_size=12, shard_by="files", replicas=(6, pipelines))
    expected = orders(steps, pipelines=pipelines, batch_size=12, shard_by="files")
    expected = np.concatenate([numbers for numbers, _ in expected], axis=1)
    found = [[] for _ in range(steps)]
    for host in range(hosts):
        for share in shares_of(split_of(), config, 12 // hosts, hosts, host):
            batches = share.window[1] - share.window[0]
            numbers, _ = order_of_share(share, steps * batches, config)
            for own, step in zip(numbers.reshape(steps, -1), found):
                step.extend(own)
    np.testing.assert_array_equal(found, expected)


def test_replicas_take_turns_in_their_pipelines_order():
    numbers, identities = order(3, batch_size=12, first_step=3)
    own, own_identities = order(12, batch_size=12, replicas=4, first_step=3)
    assert own.shape == (12, 3)
    np.testing.assert_array_equal(own.reshape(3, 12), numbers)
    np.testing.assert_array_equal(own_identities.reshape(3, 12, 3), identities)


@pytest.mark.parametrize(
    "pipelines",
    [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(5, marks=pytest.mark.long)],
)
def test_pipelines_with_own_shards_read_each_record_once_an_epoch(pipelines):
    steps = NUMBERS // (5 * pipelines)
    streams = orders(4 * steps, pipelines=pipelines, batch_size=5 * pipelines, shard_by="files")
    seen = np.concatenate([numbers.reshape(4, -1) for numbers, _ in streams], axis=1)
    identities = np.concatenate([own.reshape(4, -1, 3) for _, own in streams], axis=1)
    for epoch in seen:
        assert len(set(epoch)) == 5 * pipelines * steps  # the rest fills no batch
    for numbers, _ in streams:
        epochs = numbers.reshape(4, -1)
        assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()
    assert len(set(map(tuple, identities.reshape(-1, 3)))) == seen.size


def test_pipeline_with_own_shards_resumes():
    options = {"pipelines": 2, "batch_size": 20, "shard_by": "files"}
    for whole, resumed in zip(orders(7, **options), orders(3, first_step=4, **options)):
        assert_same([part[4:] for part in whole], resumed)


# --- Shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shard_by", "bytes", "pipelines", "by_files"),
    [
        ("auto", LARGE - 1, 2, False),
        ("auto", LARGE, 2, True),
        ("auto", LARGE, 1, False),
        ("files", 0, 2, True),
        ("files", 0, 5, True),
        ("files", 0, 1, False),
        ("records", LARGE, 6, False),
        ("auto", 0, 6, False),
    ],
)
def test_large_data_is_divided_by_files(shard_by, bytes, pipelines, by_files):
    config = Config(shard_by=shard_by)
    assert is_by_files(split_of(bytes=bytes), config, pipelines) == by_files
    assert part_of(split_of(bytes=bytes), config, pipelines, 0).by_files == by_files


@pytest.mark.parametrize(("shard_by", "bytes"), [("files", 0), ("auto", LARGE)])
def test_too_few_files_for_the_pipelines(shard_by, bytes):
    config = Config(shard_by=shard_by)
    for call in (is_by_files, lambda *args: part_of(*args, 0)):
        with pytest.raises(UserError, match="5 shards are too few for 6 workers") as caught:
            call(split_of(bytes=bytes), config, 6)
        assert "--shard_by=records" in str(caught.value)


def numbers_of(part, reader):
    """Returns the numbers of a part's records."""
    shards = part.shards().flat_map(part_reader(reader))
    return [int(number) for number in shards.as_numpy_iterator()]


def test_parts_by_files_are_equally_large():
    parts = [part_of(split_of(), Config(shard_by="files"), 3, index) for index in range(3)]
    assert [part.counts for part in parts] == [(23,), (23, 8, 9), (4, 17)]
    assert [part.examples for part in parts] == [20, 20, 21]
    assert [len(numbers_of(part, read_in_split)) for part in parts] == [20, 20, 21]
    seen = [number for part in parts for number in numbers_of(part, read_in_split)]
    assert sorted(seen) == list(range(NUMBERS))
    # The indices in the cache, which has only the part's records.
    for part in parts:
        assert numbers_of(part, read_numbers) == list(range(part.examples))


@pytest.mark.parametrize(("pipelines", "shards"), [(2, 8), (4, 8), (3, 6), (8, 8)])
def test_no_shard_is_split_if_the_numbers_divide(pipelines, shards):
    split = split_of((10,) * shards)
    for index in range(pipelines):
        part = part_of(split, Config(shard_by="files"), pipelines, index)
        assert part.paths == split.paths[index::pipelines]
        assert (part.before, part.after) == (0, 0)


@pytest.mark.parametrize(
    "counts", [(0, 5, 0), (1, 0, 0), (0, 0, 4), (2, 2, 0), (0, 1, 1), (0, 0, 0)]
)
def test_parts_of_shards_without_records(counts):
    split = split_of(counts)
    seen = []
    for index in range(3):
        part = part_of(split, Config(shard_by="files"), 3, index)
        assert part.examples in (split.examples // 3, -(-split.examples // 3))
        starts = dict(zip(split.paths, np.cumsum(counts) - counts))
        for path, _, _, first, own in part.shards().as_numpy_iterator():
            seen += [starts[path.decode()] + first + place for place in range(own)]
    assert sorted(seen) == list(range(split.examples))


def test_parts_by_records_are_a_partition():
    seen = []
    for index in range(3):
        part = part_of(split_of(), Config(shard_by="records"), 3, index)
        assert part.paths == split_of().paths and part.counts == COUNTS
        records = part.select(part.interleave(part.shards(), read_numbers, threads=2))
        seen += map(int, records.as_numpy_iterator())
    assert sorted(seen) == list(range(NUMBERS))
