"""Input servers make the same batches as this process, and failing servers are reported."""

import contextlib
import itertools
import pathlib
import socket
import textwrap
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from server_processes import HOST, running_server

from imagenet_fast import Config, UserError
from imagenet_fast.base.addresses import free_port
from imagenet_fast.data import service
from imagenet_fast.data.dataset import distributed_dataset
from imagenet_fast.data.records import locate_records

NUMBERS = 61


@pytest.fixture(scope="module")
def data(tmp_path_factory, write_data, numbered_examples):
    """61 images in three shards, of which one has two damaged records."""
    shards = [numbered_examples[:30], numbered_examples[30:40], numbered_examples[40:]]
    data = write_data(tmp_path_factory.mktemp("served") / "data", labels=NUMBERS, train=shards)
    shard = pathlib.Path(data, "train-00000-of-00003")
    content, offsets = bytearray(shard.read_bytes()), list(locate_records(shard))
    for place in (offsets[4] + 100, offsets[20] + 1):  # data of one, and the length of another
        content[place] ^= 1
    shard.write_bytes(content)
    return data


@pytest.fixture
def listeners():
    """Two sockets that stand for servers, with their addresses."""
    with contextlib.ExitStack() as sockets:
        found = {}
        for _ in range(2):
            listener = sockets.enter_context(socket.create_server((HOST, 0)))
            found[f"{HOST}:{listener.getsockname()[1]}"] = listener
        yield found


@pytest.fixture
def here(monkeypatch):
    """Has each server's batches be made in this process."""
    monkeypatch.setattr(service, "_made_by", lambda server: lambda dataset: dataset)


def numbers(batch=4):
    return tf.data.Dataset.range(10**6).batch(batch, drop_remainder=True)


def squares(order):
    return order.map(lambda numbers: (numbers, numbers**2))


def take(dataset, count):
    return list(dataset.take(count).as_numpy_iterator())


# --- Without servers ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_servers_take_turns(here, count):
    servers = tuple(f"server{index}:1" for index in range(count))
    dataset = service.batches_from_servers(numbers(), squares, servers, watched=False)
    assert dataset.element_spec == squares(numbers()).element_spec
    for batch, expected in zip(take(dataset, 20), take(squares(numbers()), 20)):
        np.testing.assert_array_equal(batch, expected)


@pytest.mark.parametrize("change", [lambda d: d.skip(1), lambda d: d.take(3).concatenate(d)])
def test_a_batch_that_is_lost_or_repeated_ends_the_stream(monkeypatch, change):
    monkeypatch.setattr(service, "_made_by", lambda server: change)
    dataset = service.batches_from_servers(numbers(), squares, ("a:1", "b:1"), watched=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="lost or repeated a batch"):
        take(dataset, 20)


def test_watched_batches_are_the_same_and_do_not_wait(here, listeners):
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    dataset = service.batches_from_servers(numbers(), squares, tuple(listeners), watched=True)
    start = time.monotonic()
    batches = take(dataset.with_options(options), 300)  # It looks each second.
    assert time.monotonic() - start < 20
    for batch, expected in zip(batches, take(squares(numbers()), 300)):
        np.testing.assert_array_equal(batch, expected)


def test_unavailable_server_ends_the_wait(here, listeners):
    servers = tuple(listeners)

    def never(order):
        return service._slowly(squares(order), seconds=1000)

    dataset = service.batches_from_servers(numbers(), never, servers, watched=True)
    threading.Timer(2.0, listeners[servers[1]].close).start()
    with pytest.raises(
        tf.errors.OpError, match=f"UserError: input server {servers[1]} is unavailable"
    ):
        take(dataset, 1)


@pytest.mark.parametrize(
    ("pipelines", "shares"),
    [(1, ["abc"]), (2, ["ac", "b"]), (3, ["a", "b", "c"]), (5, ["a", "b", "c", "a", "b"])],
)
def test_servers_are_divided_among_hosts(pipelines, shares):
    found = [service.servers_of(("a", "b", "c"), pipelines, index) for index in range(pipelines)]
    assert ["".join(share) for share in found] == shares


def test_both_servers_on_one_port_are_refused():
    port = free_port()
    with (
        pytest.raises(UserError, match=f"port and worker_port are both {port}: give two"),
        service.input_server(port, HOST, port),
    ):
        pass


def test_unreachable_server_is_named(data):
    address = f"{HOST}:{free_port()}"
    config = Config(
        data_dir=data, image_size=8, batch_size=8, strategy="one_device", input_servers=[address]
    )
    with pytest.raises(UserError, match=f"input server {address} cannot be reached .*refused") as e:
        distributed_dataset(config, "train")
    assert f"imagenet-fast input-server --port={address.split(':')[1]}" in str(e.value)


def test_listener_that_is_not_a_server(listeners, monkeypatch):
    monkeypatch.setattr(service, "_TRIAL_TIMEOUT", 2.0)
    address = next(iter(listeners))
    with pytest.raises(UserError, match=f"{address} is reachable, but made no batch in 2 s"):
        service.check_servers((address,), numbers)


# --- With servers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started():
    """Two servers: their processes and addresses."""
    with running_server() as one, running_server() as other:
        yield one, other


@pytest.fixture(scope="module")
def servers(started):
    """Their addresses."""
    return [address for _, address in started]


def batches(config, first_step, count=16):
    dataset = distributed_dataset(config, "train", first_step)
    return [[part.numpy() for part in batch] for batch in itertools.islice(dataset, count)]


# From the start, in the first epoch and over its end, and in the second; 7 steps are an epoch.
@pytest.mark.parametrize(
    "first_step",
    [pytest.param(0, marks=pytest.mark.long), 5, pytest.param(11, marks=pytest.mark.long)],
)
def test_stream_is_the_same_with_servers(data, servers, first_step):
    config = Config(
        data_dir=data,
        image_size=8,
        batch_size=8,
        shuffle_buffer=20,
        seed=3,
        strategy="one_device",
    )
    plain = batches(config, first_step)
    served = batches(config.replace(input_servers=servers, data_threads=3), first_step)
    assert len(served) == 16
    # In parts of three epochs at most, none of which has the two damaged records twice.
    assert 0 < sum(np.sum(weights == 0) for _, _, weights in served) <= 6
    for batch, expected in zip(served, plain):
        for part, expected_part in zip(batch, expected):
            np.testing.assert_array_equal(part, expected_part)


@pytest.mark.long
def test_servers_get_absolute_paths(data, servers, monkeypatch):
    monkeypatch.chdir(pathlib.Path(data).parent)
    config = Config(data_dir="data", image_size=8, batch_size=8, strategy="one_device")
    assert len(batches(config.replace(input_servers=servers), 0, count=3)) == 3


def test_validation_images_are_not_served(tmp_path, write_data, numbered_examples):
    shards = [numbered_examples[:8]]
    data = write_data(tmp_path / "data", labels=NUMBERS, train=shards, validation=shards)
    config = Config(data_dir=data, image_size=8, batch_size=8, strategy="one_device")
    config = config.replace(input_servers=[f"{HOST}:{free_port()}"])
    assert sum(batch[2].numpy().sum() for batch in distributed_dataset(config, "validation")) == 8


def test_missing_files_on_a_server_are_reported_at_once(tmp_path, servers):
    missing = str(tmp_path / "train-00000-of-00001")

    def trial():
        return tf.data.FixedLengthRecordDataset(missing, record_bytes=1)

    with pytest.raises(UserError, match=f"{servers[0]} cannot make batches .*{missing}") as caught:
        service.check_servers(servers, trial)
    assert "data_dir at the same path" in str(caught.value)


DETERMINISTIC_SCRIPT = """
    import sys
    from imagenet_fast import Config
    from imagenet_fast.data.dataset import distributed_dataset

    config = Config(data_dir=sys.argv[1], image_size=8, batch_size=8, strategy="one_device")
    config = config.replace(deterministic=True, input_servers=sys.argv[2])
    for number, batch in zip(range(20), distributed_dataset(config, "train")):
        pass
    print(number)
"""


@pytest.mark.long
def test_deterministic_stream_is_not_watched(data, servers, run_python):
    # TensorFlow would wait for the watch to give something.
    script = textwrap.dedent(DETERMINISTIC_SCRIPT)
    finished = run_python(["-c", script, data, ",".join(servers)], fresh=True)
    assert finished.stdout == "19\n"
    assert "unavailable input servers will not be noticed" in finished.stderr


@pytest.mark.long
def test_a_server_that_is_killed_ends_the_stream(data, started):
    """The last test: it ends one of the servers that all others use."""
    process, address = started[0]
    config = Config(data_dir=data, image_size=8, batch_size=8, strategy="one_device")
    stream = iter(distributed_dataset(config.replace(input_servers=[address]), "train"))
    next(stream)
    process.kill()
    with pytest.raises(
        tf.errors.OpError, match=f"UserError: input server {address} is unavailable"
    ):
        for _ in stream:
            pass
