import collections.abc
import itertools
import json
import pathlib
import textwrap
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError, make_dataset
from imagenet_fast.data import dataset as datasets
from imagenet_fast.data import manifest as manifests
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.info import read_info
from imagenet_fast.data.records import locate_records
from imagenet_fast.data.steps import evaluation_steps, steps_per_epoch

TRAIN_SHARDS = (23, 9, 17, 8, 4)  # 61 images, numbered from 0, each of a class of its own
VALIDATION_SHARDS = (19, 3, 14, 11, 6)  # 53
CLASSES = 61


class Hosts:
    """Stands for a strategy with several hosts, each with an input pipeline and some replicas."""

    def __init__(self, hosts, replicas=1):
        self.hosts = hosts
        self.num_replicas_in_sync = hosts * replicas
        devices = [
            f"/job:worker/replica:0/task:{host}/device:GPU:{replica}"
            for host in range(hosts)
            for replica in range(replicas)
        ]
        self.extended = types.SimpleNamespace(worker_devices=devices)

    def distribute_datasets_from_function(self, function):
        return HostDatasets(self, function)


class HostDatasets(collections.abc.Sequence):
    """The dataset of each host, made when it is asked for; it may have attributes."""

    def __init__(self, strategy, function):
        self._strategy, self._function = strategy, function

    def __len__(self):
        return self._strategy.hosts

    def __getitem__(self, host):
        if host not in range(len(self)):
            raise IndexError
        replicas = self._strategy.num_replicas_in_sync
        return self._function(tf.distribute.InputContext(len(self), host, replicas))


class TpuSlice(Hosts):
    """Stands for a TPU with several hosts, none of which is this process."""


@pytest.fixture(scope="module")
def host_datasets():
    """Calls distributed_dataset for a strategy of several hosts; returns the dataset of each."""

    def make(config, split, hosts=1, replicas=1, first_step=0, kind=Hosts):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(datasets, "make_strategy", lambda config: kind(hosts, replicas))
            patch.setattr(tf.distribute, "TPUStrategy", TpuSlice)
            return distributed_dataset(config, split, first_step)

    return make


def split_evenly(items, sizes):
    items = iter(items)
    return [list(itertools.islice(items, size)) for size in sizes]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory, write_data, numbered_examples):
    """61 training and 53 validation images; an image's label is its number."""
    return write_data(
        tmp_path_factory.mktemp("numbered") / "data",
        labels=CLASSES,
        train=split_evenly(numbered_examples, TRAIN_SHARDS),
        validation=split_evenly(numbered_examples, VALIDATION_SHARDS),
    )


def plain(data, **changes):
    """No augmentation: what is fast to trace, and gives each image as evaluation does."""
    return Config(
        data_dir=data, **{"image_size": 8, "train_crop": "none", "flip": False, **changes}
    )


def augmented(data, **changes):
    """Random crops and flips; test_batches.py has colours, which take long to trace."""
    return Config(data_dir=data, **{"image_size": 8, **changes})


def take(dataset, batches):
    """Returns (images, labels, weights) of so many batches, each [batches, batch, ...]."""
    parts = zip(*dataset.take(batches).as_numpy_iterator())
    return tuple(np.stack(part) for part in parts)


def read_all(dataset):
    return take(dataset, -1)


def assert_same(one, other):
    for part, other_part in zip(one, other):
        np.testing.assert_array_equal(part, other_part)


# --- A batch --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "validation"])
def test_batches_are_as_documented(digits, split):
    config = Config(data_dir=digits, image_size=16, batch_size=32, strategy="one_device")
    dataset = distributed_dataset(config, split)
    spec = (
        tf.TensorSpec([32, 16, 16, 3], tf.uint8),
        tf.TensorSpec([32], tf.int32),
        tf.TensorSpec([32], tf.float32),
    )
    assert dataset.element_spec == spec
    images, labels, weights = next(iter(dataset))
    assert (images.dtype, labels.dtype, weights.dtype) == (tf.uint8, tf.int32, tf.float32)
    assert (weights.numpy() == 1).all()
    assert set(labels.numpy()) <= set(range(10))
    assert images.numpy().std() > 20


@pytest.mark.long
def test_evaluation_reads_all_images_of_prepared_digits(digits):
    config = plain(digits, batch_size=100, strategy="one_device")
    labels = np.concatenate(
        [batch[1].numpy() for batch in distributed_dataset(config, "validation")]
    )
    counts = manifests.read_manifest(digits).splits["validation"].class_counts
    assert tuple(np.bincount(labels[labels >= 0], minlength=10)) == counts
    assert len(labels) == 400 and (labels == -1).sum() == 41


# --- Order ----------------------------------------------------------------------------------------


def test_batch_larger_than_the_data_set(numbered):
    config = plain(numbered, batch_size=8)
    info = read_info(config)
    examples = info.splits["train"].examples
    assert steps_per_epoch(info, config.replace(batch_size=examples)) == 1
    with pytest.raises(
        UserError, match=f"batch_size is {examples + 1}, but .* has only {examples} "
    ):
        steps_per_epoch(info, config.replace(batch_size=examples + 1))


@pytest.mark.long
def test_each_epoch_has_each_image_once_in_a_new_order(numbered, evaluated, host_datasets):
    config = plain(numbered, batch_size=8)
    assert steps_per_epoch(read_info(config), config) == 7
    images, labels, weights = take(host_datasets(config, "train")[0], 28)
    assert (weights == 1).all()
    np.testing.assert_array_equal(images, evaluated[labels])
    epochs = labels.reshape(4, 56)
    for epoch in epochs:
        assert len(set(epoch)) == 56
        assert not (np.diff(epoch) == 1).sum() > 10  # not in order
    for one, other in itertools.combinations(epochs, 2):
        assert (one == other).mean() < 0.2
    # What did not fill a batch is not always the same.
    assert len(set(labels.flat)) == CLASSES


@pytest.fixture(scope="module")
def uninterrupted(numbered, host_datasets):
    """The first 16 batches of 8 augmented images, more than two epochs."""
    (dataset,) = host_datasets(augmented(numbered, batch_size=8, seed=3), "train")
    return take(dataset, 16)


# In the first epoch and over its end; at the second one's start; in the second.
@pytest.mark.parametrize(
    "first_step",
    [pytest.param(5, marks=pytest.mark.long), 7, pytest.param(11, marks=pytest.mark.long)],
)
def test_resumed_stream_continues_the_uninterrupted_one(
    numbered, uninterrupted, host_datasets, first_step
):
    tf.random.set_seed(first_step)
    tf.random.uniform([3])
    config = augmented(numbered, batch_size=8, seed=3)
    (dataset,) = host_datasets(config, "train", first_step=first_step)
    assert_same(take(dataset, 4), [part[first_step : first_step + 4] for part in uninterrupted])


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_stream_does_not_depend_on_threads_nor_on_tensorflows_seed(
    numbered, uninterrupted, host_datasets, threads
):
    tf.random.set_seed(threads)
    config = augmented(numbered, batch_size=8, seed=3, data_threads=threads)
    assert_same(take(host_datasets(config, "train")[0], 16), uninterrupted)


@pytest.mark.long
def test_new_iterator_starts_at_the_same_image(numbered, uninterrupted, host_datasets):
    (dataset,) = host_datasets(augmented(numbered, batch_size=8, seed=3), "train")
    for _ in range(2):
        assert_same(take(dataset, 9), [part[:9] for part in uninterrupted])


def test_augmentation_differs_by_place_and_epoch(
    tmp_path, write_data, numbered_example, host_datasets
):
    data = write_data(tmp_path / "data", labels=CLASSES, train=[[numbered_example(5)] * 12])
    images, _, _ = take(host_datasets(augmented(data, batch_size=12), "train")[0], 3)
    assert len({image.tobytes() for epoch in images for image in epoch}) == 36


@pytest.mark.long
def test_seed_changes_order_and_augmentation(numbered, uninterrupted, host_datasets):
    images, labels, _ = uninterrupted
    # Seed 4's first epoch is not seed 3's second one either.
    config = augmented(numbered, batch_size=8, seed=4)
    other_images, other_labels, _ = take(host_datasets(config, "train")[0], 7)
    for epoch in (labels[:7], labels[7:14]):
        assert (other_labels == epoch).mean() < 0.2
    for number in set(labels[:7].flat) & set(other_labels.flat):
        one, other = images[:7][labels[:7] == number], other_images[other_labels == number]
        assert (one != other).any()


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.long), {"synthetic": True, "num_classes": 7}]
)
def test_largest_seed(numbered, host_datasets, options):
    config = plain(numbered, batch_size=8, seed=2**32 - 1, **options)
    _, labels, weights = take(host_datasets(config, "train")[0], 2)
    assert (weights == 1).all() and len(set(labels.flat)) > 1


# --- Several hosts --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_host(numbered, host_datasets):
    """The first 13 batches of 12 augmented images: 5 are an epoch."""
    return take(host_datasets(augmented(numbered, batch_size=12), "train")[0], 13)


# In the default run, test_order.py has their order, which decides all of an image.
@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "first_step"),
    [
        (2, 0),
        (3, 2),
        (4, 0),
    ],
)
def test_hosts_take_turns_in_one_global_stream(
    numbered, one_host, host_datasets, hosts, first_step
):
    config = augmented(numbered, batch_size=12, shard_by="records")
    shares = host_datasets(config, "train", hosts=hosts, first_step=first_step)
    for host, share in enumerate(shares):
        own = take(share, 13 - first_step)
        assert own[1].shape == (13 - first_step, 12 // hosts)
        size = 12 // hosts
        window = slice(host * size, (host + 1) * size)
        assert_same(own, [part[first_step:, window] for part in one_host])


# In the default run, replicas of a strategy do, below.
@pytest.mark.long
def test_replicas_take_turns_in_their_hosts_batches(numbered, host_datasets):
    config = plain(numbered, batch_size=12)
    _, whole, _ = take(host_datasets(config, "train", first_step=3)[0], 3)
    _, shares, _ = take(host_datasets(config, "train", replicas=4, first_step=3)[0], 12)
    assert shares.shape == (12, 3)
    np.testing.assert_array_equal(shares.reshape(3, 12), whole)


# In the default run, test_order.py has it.
@pytest.mark.long
@pytest.mark.parametrize("host", [0, 1])
def test_host_with_own_files_resumes(numbered, host_datasets, host):
    config = plain(numbered, batch_size=20, shard_by="files")
    whole = take(host_datasets(config, "train", hosts=2)[host], 7)
    resumed = take(host_datasets(config, "train", hosts=2, first_step=4)[host], 3)
    assert_same([part[4:] for part in whole], resumed)


@pytest.mark.parametrize("split", ["train", pytest.param("validation", marks=pytest.mark.long)])
def test_too_few_files_for_the_hosts(numbered, host_datasets, split):
    config = plain(numbered, batch_size=12, shard_by="files")
    with pytest.raises(UserError, match="5 shards are too few for 6 workers") as caught:
        host_datasets(config, split, hosts=6)[0]
    assert "--shard_by=records" in str(caught.value)
    assert host_datasets(config.replace(shard_by="records"), split, hosts=6)[5]


REPLICAS_SCRIPT = """
    import json, sys
    from imagenet_fast import Config, make_strategy
    from imagenet_fast.data.dataset import distributed_dataset

    config = Config(data_dir=sys.argv[1], image_size=8, batch_size=12, logical_cpus=4)
    for name in ("one_device", "mirrored"):
        changed = config.replace(strategy=name)
        strategy = make_strategy(changed)
        batches = []
        for batch in distributed_dataset(changed, "train", first_step=4):
            parts = [strategy.experimental_local_results(part) for part in batch]
            batches.append([[p.numpy().tolist() for p in part] for part in parts])
            if len(batches) == 2:
                break
        seen = [
            label
            for batch in distributed_dataset(changed, "validation")
            for part in strategy.experimental_local_results(batch[1])
            for label in part.numpy().tolist()
        ]
        print(json.dumps([batches, seen]))
"""


def test_replicas_of_a_strategy_share_the_batches_of_one_device(numbered, run_python):
    finished = run_python(["-c", textwrap.dedent(REPLICAS_SCRIPT), numbered])
    (batches, seen), (shared, also_seen) = map(json.loads, finished.stdout.splitlines())
    for whole, shares in zip(batches, shared):
        for part, parts in zip(whole, shares):
            assert len(part) == 1 and len(parts) == 4
            np.testing.assert_array_equal(np.concatenate(parts), part[0])
    assert seen == also_seen
    assert sorted(label for label in seen if label >= 0) == list(range(53))


# --- Hosts that are not this process --------------------------------------------------------------

PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc", "GeneratorDataset"}


def operations(dataset):
    """Returns the names of all TensorFlow operations in a dataset and its functions."""
    variant = tf.data.experimental.to_variant(dataset)
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = [
        *graph.node,
        *(node for function in graph.library.function for node in function.node_def),
    ]
    return {node.op for node in nodes}


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.long), "validation"])
def test_hosts_of_a_tpu_slice_need_no_python(numbered, tmp_path, host_datasets, split):
    config = augmented(numbered, batch_size=12, model_dir=str(tmp_path))
    (here,) = host_datasets(config, split)
    assert operations(here) & PYTHON_OPS == {"PyFunc"}
    found = operations(host_datasets(config, split, hosts=2, kind=TpuSlice)[1])
    assert "TFRecordDatasetV2" in found and not found & PYTHON_OPS
    assert "ImagenetFastResize" not in found


# In the default run, the operations of such a pipeline are looked at, above.
@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "validation"])
def test_batches_on_a_tpu_slice_are_the_same(numbered, host_datasets, capsys, split):
    datasets.warn_once.cache_clear()
    config = plain(numbered, batch_size=12, train_crop="random_resized")
    here, there = (
        host_datasets(config, split, hosts=2, first_step=3, kind=kind)[1]
        for kind in (Hosts, TpuSlice)
    )
    assert_same(take(here, 5), take(there, 5))
    host_datasets(config, split, hosts=2, kind=TpuSlice)  # Of which nothing is told again.
    told = capsys.readouterr().err
    assert told.count(f"{split} images are read on the hosts of the TPU slice") == 1


@pytest.mark.long
def test_damaged_records_on_a_tpu_slice_lose_no_others(
    tmp_path, write_data, numbered_examples, evaluated, host_datasets
):
    shards = split_evenly(numbered_examples, (10, 12, 8))
    data = write_data(tmp_path / "data", labels=CLASSES, train=shards)
    shard = pathlib.Path(data) / "train-00001-of-00003"  # numbers 10 to 21
    content = bytearray(shard.read_bytes())
    content[list(locate_records(shard))[5] + 50] ^= 1
    shard.write_bytes(content)
    config = plain(data, batch_size=30, model_dir=str(tmp_path / "run"))
    for batch in zip(*take(host_datasets(config, "train", kind=TpuSlice)[0], 2)):
        images, labels = (part[batch[2] == 1] for part in batch[:2])
        assert sorted(labels) == [number for number in range(30) if number != 15]
        np.testing.assert_array_equal(images, evaluated[labels])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "encoded"}, "cache=encoded caches training images in the process that trains"),
        (
            {"cache": "decoded"},
            "cache=decoded caches .* on the hosts of the TPU slice: remove it",
        ),
        ({"cache_dir": "/local"}, "cache_dir=/local caches"),
        ({"cache": "encoded", "input_servers": ["a:1"]}, "cache=encoded .* read on input servers"),
        ({"resize_kernel": "native"}, "resize_kernel=native is unavailable on the hosts of a TPU"),
    ],
)
def test_options_that_need_this_process_are_refused_for_a_tpu_slice(
    numbered, host_datasets, options, message
):
    config = plain(numbered, batch_size=12, **options)
    with pytest.raises(UserError, match=message):
        host_datasets(config, "train", hosts=2, kind=TpuSlice)


def test_validation_images_are_not_cached(numbered, host_datasets):
    config = plain(numbered, batch_size=12, cache="encoded")
    assert host_datasets(config, "validation", hosts=2, kind=TpuSlice)[1]


def test_tpu_in_this_process_is_not_a_slice():
    slice_ = TpuSlice(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute, "TPUStrategy", TpuSlice)
        assert not datasets._runs_here(slice_)
        slice_.extended.worker_devices = ["/job:localhost/replica:0/task:0/device:TPU:0"]
        assert datasets._runs_here(slice_)


# --- Evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "replicas", "batch_size", "shard_by", "steps"),
    [
        pytest.param(1, 1, 1, "records", 53, marks=pytest.mark.long),
        pytest.param(1, 1, 7, "records", 8, marks=pytest.mark.long),
        pytest.param(1, 1, 64, "records", 1, marks=pytest.mark.long),
        (1, 3, 7, "records", 6),  # 3 a replica
        # 4 a replica; 27 and 26 images; test_order.py shares records, too
        pytest.param(2, 1, 7, "records", 7, marks=pytest.mark.long),
        pytest.param(3, 2, 64, "records", 1, marks=pytest.mark.long),
        pytest.param(
            4, 1, 1, "records", 14, marks=pytest.mark.long
        ),  # 14 and three times 13 images
        pytest.param(1, 1, 7, "files", 8, marks=pytest.mark.long),
        (2, 1, 7, "files", 7),  # as with records
        # 17 and twice 18 images, 3 a step
        pytest.param(3, 1, 7, "files", 6, marks=pytest.mark.long),
        pytest.param(4, 2, 64, "files", 1, marks=pytest.mark.long),
    ],
)
def test_evaluation_sees_each_image_once(
    numbered, evaluated, host_datasets, hosts, replicas, batch_size, shard_by, steps
):
    config = plain(numbered, batch_size=48, eval_batch_size=batch_size, shard_by=shard_by)
    info = read_info(config)
    assert evaluation_steps(info, config, Hosts(hosts, replicas)) == steps
    seen = []
    for dataset in host_datasets(config, "validation", hosts=hosts, replicas=replicas):
        images, labels, weights = read_all(dataset)
        size = min(-(-batch_size // (hosts * replicas)), -(-53 // (hosts * replicas)))
        assert labels.shape == (steps * replicas, size)
        real = labels >= 0
        np.testing.assert_array_equal(weights, real)
        np.testing.assert_array_equal(images[real], evaluated[labels[real]])
        assert (labels[~real] == -1).all() and not images[~real].any()
        seen += labels[real].tolist()
    assert sorted(seen) == list(range(53))


def test_evaluation_batch_size_defaults_to_that_of_training(numbered, host_datasets):
    config = plain(numbered, batch_size=20)
    (dataset,) = host_datasets(config, "validation")
    assert dataset.element_spec[1].shape == [20]
    assert evaluation_steps(read_info(config), config, Hosts(1)) == 3


@pytest.mark.long
def test_evaluation_can_be_repeated(numbered, host_datasets):
    (dataset,) = host_datasets(plain(numbered, batch_size=20), "validation")
    assert_same(read_all(dataset), read_all(dataset))


# --- Bad input ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad_images(tmp_path_factory, write_data, bad_examples):
    """The numbered images in one shard, some of them unreadable; and the numbers of those."""
    examples, bad = bad_examples
    directory = tmp_path_factory.mktemp("bad") / "data"
    data = write_data(directory, labels=CLASSES, train=[examples], validation=[examples])
    return data, bad


@pytest.mark.long
def test_unreadable_images_keep_their_places_in_evaluation(bad_images, evaluated, host_datasets):
    data, bad = bad_images
    (dataset,) = host_datasets(plain(data, batch_size=8), "validation")
    images, labels, weights = (np.concatenate(part) for part in read_all(dataset))
    numbers = np.arange(CLASSES)
    good = ~np.isin(numbers, bad)
    np.testing.assert_array_equal(weights, [*good, *[0] * 3])
    np.testing.assert_array_equal(labels, [*np.where(good, numbers, 0), *[-1] * 3])
    np.testing.assert_array_equal(images[:CLASSES][good], evaluated[good])
    assert not images[:CLASSES][~good].any() and not images[CLASSES:].any()


# In the default run, test_batches.py has it.
@pytest.mark.long
def test_unreadable_images_change_no_other_image_of_a_training_batch(
    bad_images, tmp_path, write_data, numbered_examples, host_datasets
):
    data, bad = bad_images
    good = write_data(tmp_path / "data", labels=CLASSES, train=[numbered_examples])
    # Not random_resized, whose window may lie in what there is of a JPEG that lacks its end.
    changes = {"train_crop": "pad", "batch_size": 12}
    streams = []
    for directory in (good, data):
        (dataset,) = host_datasets(augmented(directory, **changes), "train")
        streams.append(take(dataset, 6))
    (images, labels, weights), (bad_images_, bad_labels, bad_weights) = streams
    lost = np.isin(labels, bad)
    assert (weights == 1).all() and lost.sum() > 6
    np.testing.assert_array_equal(bad_weights, ~lost)
    np.testing.assert_array_equal(bad_labels, np.where(lost, 0, labels))
    np.testing.assert_array_equal(bad_images_[~lost], images[~lost])
    assert not bad_images_[lost].any()


@pytest.fixture
def one_shard(tmp_path, write_data, numbered_examples):
    """20 numbered validation images in one shard; returns the directory and the shard."""
    examples = numbered_examples[:20]
    data = write_data(tmp_path / "data", labels=CLASSES, train=[examples], validation=[examples])
    return data, pathlib.Path(data) / "validation-00000-of-00001"


def test_corrupt_record_costs_one_image(one_shard, evaluated, host_datasets):
    data, shard = one_shard
    content = bytearray(shard.read_bytes())
    content[list(locate_records(shard))[7] + 100] ^= 0x10
    shard.write_bytes(content)
    (dataset,) = host_datasets(plain(data, batch_size=5), "validation")
    images, labels, weights = (np.concatenate(part) for part in read_all(dataset))
    good = np.arange(20) != 7
    np.testing.assert_array_equal(labels, np.where(good, range(20), 0))
    np.testing.assert_array_equal(weights, good)
    np.testing.assert_array_equal(images[good], evaluated[:20][good])


@pytest.mark.long
def test_two_corrupt_records_in_one_of_several_shards(
    tmp_path, write_data, numbered_examples, host_datasets
):
    shards = split_evenly(numbered_examples, (10, 12, 8))
    data = write_data(tmp_path / "data", labels=CLASSES, train=shards)
    shard = pathlib.Path(data) / "train-00001-of-00003"  # numbers 10 to 21
    content = bytearray(shard.read_bytes())
    for number, place in ((13, 50), (18, 1)):  # its data, its length
        content[list(locate_records(shard))[number - 10] + place] ^= 1
    shard.write_bytes(content)
    config = plain(data, batch_size=15)
    batches = take(host_datasets(config, "train")[0], 4)
    _, labels, weights = batches
    for epoch in (slice(0, 2), slice(2, 4)):
        assert weights[epoch].sum() == 28
        seen = labels[epoch][weights[epoch] == 1]
        assert sorted(seen) == [number for number in range(30) if number not in (13, 18)]
    # Resumed, and from a cache.
    cached = config.replace(cache="encoded")
    resumed = take(host_datasets(cached, "train", first_step=1)[0], 3)
    assert_same(resumed, [part[1:] for part in batches])


@pytest.mark.long
def test_shard_truncated_during_the_run(one_shard, evaluated, host_datasets):
    data, shard = one_shard
    (dataset,) = host_datasets(plain(data, batch_size=8), "validation")
    shard.write_bytes(shard.read_bytes()[: list(locate_records(shard))[13] + 30])
    images, labels, weights = (np.concatenate(part) for part in read_all(dataset))
    np.testing.assert_array_equal(labels, [*range(13), *[0] * 7, *[-1] * 4])
    np.testing.assert_array_equal(weights, [*[1] * 13, *[0] * 11])
    np.testing.assert_array_equal(images[:13], evaluated[:13])


def test_shard_truncated_before_the_run_is_named(one_shard, host_datasets):
    data, shard = one_shard
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="validation-00000-of-00001: is truncated"):
        host_datasets(plain(data, batch_size=8), "train")


# --- Other data -----------------------------------------------------------------------------------


@pytest.mark.long
def test_shards_of_converters_whose_labels_start_at_one(
    tmp_path, write_data, numbered_example, evaluated, host_datasets
):
    examples = [numbered_example(number, label=number + 1) for number in range(12)]
    data = write_data(tmp_path / "data", train=[examples], validation=[examples])
    config = plain(data, batch_size=4, num_classes=12, label_offset=-1)
    images, labels, weights = take(host_datasets(config, "validation")[0], 3)
    np.testing.assert_array_equal(labels.flat, range(12))
    np.testing.assert_array_equal(images.reshape(evaluated[:12].shape), evaluated[:12])
    assert (weights == 1).all()
    with pytest.raises(UserError, match="--label_offset=-1"):
        host_datasets(config.replace(label_offset=0), "validation")


def test_missing_split(one_shard, tmp_path, write_data, numbered_example, host_datasets):
    data, _ = one_shard
    with pytest.raises(UserError, match="no test split, only train, validation"):
        host_datasets(plain(data, batch_size=8), "test")
    alone = write_data(tmp_path / "alone", labels=CLASSES, train=[[numbered_example(0)]])
    with pytest.raises(UserError, match="no validation split, only train"):
        host_datasets(plain(alone, batch_size=1), "validation")


def test_synthetic_batches(host_datasets):
    config = Config(synthetic=True, num_classes=5, image_size=10, batch_size=64)
    (dataset,) = host_datasets(config, "train", replicas=2)
    images, labels, weights = take(dataset, 3)
    assert images.shape == (3, 32, 10, 10, 3) and images.dtype == np.uint8
    assert set(labels.flat) == set(range(5)) and labels.dtype == np.int32
    assert (weights == 1).all() and weights.dtype == np.float32
    assert images.min() == 0 and images.max() == 255
    assert (images == images[0]).all()
    again = take(host_datasets(config, "train", replicas=2)[0], 1)
    np.testing.assert_array_equal(images[:1], again[0])
    with pytest.raises(UserError, match="synthetic has no validation split"):
        host_datasets(config, "validation")


# --- Datasets for any Keras model -----------------------------------------------------------------


def test_one_device_has_epochs_of_known_length(numbered):
    """Each iteration is the next epoch, of the batches that a run gets."""
    config = plain(numbered, batch_size=8, strategy="one_device")
    dataset = make_dataset(config, "train", first_step=2)
    assert len(dataset) == 7
    epochs = [[labels.numpy().tolist() for _, labels, _ in dataset] for _ in range(2)]
    stream = distributed_dataset(config, "train", first_step=2)
    expected = [labels.numpy().tolist() for _, labels, _ in itertools.islice(stream, 14)]
    assert epochs[0] + epochs[1] == expected


@pytest.mark.long
def test_one_device_evaluates_images_without_placeholders(numbered):
    config = plain(numbered, batch_size=8, strategy="one_device")
    dataset = make_dataset(config, "validation")
    assert len(dataset) == 7
    sizes = [len(images) for images, _, _ in dataset]
    assert sizes == [8] * 6 + [5]
    assert sorted(label for _, labels, _ in dataset for label in labels.numpy()) == list(range(53))


def test_placeholders_are_removed_unless_a_batch_has_nothing_else():
    images, labels = tf.reshape(tf.range(3), [3, 1, 1, 1]), tf.constant([4, 0, -1])
    weights = tf.constant([1.0, 0.0, 0.0])
    kept = datasets._without_placeholders(images, labels, weights)
    assert [part.numpy().ravel().tolist() for part in kept] == [[0], [4], [1.0]]
    assert len(datasets._without_placeholders(images, labels, 0 * weights)[0]) == 3


@pytest.mark.long
def test_a_plain_model_fits_and_counts_each_image_once(numbered):
    config = plain(numbered, batch_size=8, strategy="one_device")
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(61)]
    model = keras.Sequential([keras.Input((*[config.image_size] * 2, 3)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Eagerly, because tracing takes longer than these few steps.
    model.compile("adam", loss, weighted_metrics=["accuracy"], run_eagerly=True)
    validation = make_dataset(config, "validation")
    counter = CountBatches()
    history = model.fit(
        make_dataset(config, "train"),
        validation_data=validation,
        epochs=2,
        verbose=0,
        callbacks=[counter],
    ).history
    assert (counter.params["steps"], counter.batches) == (7, 14)
    images, labels, _ = (np.concatenate(parts) for parts in zip(*validation))
    right = model.predict(validation, verbose=0).argmax(1) == labels
    assert history["val_accuracy"][-1] == pytest.approx(right.mean())
    losses = keras.losses.sparse_categorical_crossentropy(labels, model(images), from_logits=True)
    assert history["val_loss"][-1] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-5)


class CountBatches(keras.callbacks.Callback):
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
