"""Rows of an evaluation, and names, against the records of the shards."""

import pathlib
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import Config
from imagenet_fast.data import dataset, evaluated
from imagenet_fast.data.evaluated import evaluated_images, file_names, file_names_of
from imagenet_fast.data.examples import FILENAME, LABEL, decode_example
from imagenet_fast.data.info import read_info
from imagenet_fast.data.records import read_records


@pytest.fixture(scope="module")
def config(digits):
    return Config(data_dir=digits, image_size=16, batch_size=96, eval_batch_size=36)


@pytest.fixture(scope="module")
def records(config):
    """The fields of each validation record, shard by shard."""
    paths = read_info(config).splits["validation"].paths
    return [decode_example(record) for path in paths for record in read_records(path)]


@pytest.mark.parametrize(
    ("pipelines", "replicas", "shard_by"),
    [(1, 1, "auto"), (1, 3, "auto"), (2, 4, "records"), (2, 2, "files"), (3, 3, "files")],
)
def test_rows_have_the_images_that_the_pipelines_give(
    config, records, monkeypatch, pipelines, replicas, shard_by
):
    config, info = config.replace(shard_by=shard_by), read_info(config)
    strategy = types.SimpleNamespace(num_replicas_in_sync=replicas)
    for module in (evaluated, "imagenet_fast.data.steps"):
        monkeypatch.setattr(
            *(
                (module, "input_pipelines")
                if module is evaluated
                else (f"{module}.input_pipelines",)
            ),
            lambda _: pipelines,
        )
    found = evaluated_images(info, config, strategy, "validation").reshape(replicas, -1)
    size = -(-36 // replicas)
    # Each replica's labels, as tf.distribute deals a pipeline's batches.
    labels = [[] for _ in range(replicas)]
    own = replicas // pipelines
    for pipeline in range(pipelines):
        host = dataset._Host(info, config, pipelines, pipeline, here=True)
        batches = host.evaluation_batches(size, "validation")
        for number, (_, some, _) in enumerate(batches.take(found.size // replicas // size * own)):
            labels[pipeline * own + number % own].extend(some.numpy())
    expected = np.array([fields[LABEL][0] for fields in records] + [-1])  # padding
    np.testing.assert_array_equal(expected[found], labels)
    assert sorted(found[found >= 0]) == list(range(359))


def test_images_on_devices(config, records):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    on_device = config.replace(data_on_device=True, train_crop="none")
    found = evaluated_images(read_info(config), on_device, strategy, "validation")
    assert found.tolist() == [*range(359), -1]


def test_names(config, records):
    info = read_info(config)
    expected = [fields[FILENAME][0].decode() for fields in records]
    assert list(file_names(info, "validation")) == expected
    assert len(set(expected)) == 359
    some = [358, 0, 90, 89, 91, 17, 17]
    assert file_names_of(info, "validation", some) == [expected[index] for index in some]
    assert file_names_of(info, "validation", []) == []


def test_a_damaged_record_has_no_name(config, records, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(config.data_dir, data)
    info = read_info(config.replace(data_dir=str(data)))
    path = pathlib.Path(info.splits["validation"].paths[1])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    names = list(file_names(info, "validation"))
    expected = [fields[FILENAME][0].decode() for fields in records]
    differing = [i for i, (name, other) in enumerate(zip(names, expected)) if name != other]
    assert len(names) == 359
    assert [names[index] for index in differing] == [""]
    assert file_names_of(info, "validation", differing) == [""]
