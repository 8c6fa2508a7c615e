"""Batches that other machines make: tf.data service, used so that the stream stays what it is.

Each input server has a dispatcher and one worker of its own, so that of W servers the i-th can be
asked for the batches i, i + W, i + 2W and so on, and they are taken in turn. Each of them reads all
records that the host trains on, but decodes only what is in its own batches.

A server has none of the Python functions of the process that trains.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from imagenet_fast.base.addresses import check_free, unreachable
from imagenet_fast.base.errors import UserError
from imagenet_fast.data.malloc import keep_freed_memory
from imagenet_fast.data.options import DataOptions
from imagenet_fast.data.resize_op import with_resize_kernel

_PROTOCOL = "grpc"
# Batches that wait in a server, and as many from each in the host that trains.
_BATCHES_AHEAD = 2
# Seconds: in which a server must have done a trial, between two looks.
_TRIAL_WITHIN = 30.0
_LOOK_EVERY = 1.0
# After this many milliseconds a server forgets what a training run that has ended has left there.
_FORGET_AFTER = 10_000


@contextlib.contextmanager
def input_server(port: int, host: str, worker_port: int = 0) -> Iterator[str]:
    """Makes batches for training runs on other machines, in threads, until the context ends.

    Args:
      port: on which training runs ask for it.
      host: name or address by which they reach this machine.
      worker_port: on which they fetch batches; 0: any free one.

    Yields:
      Its address, ``host:port``, as in ``Config.input_servers``.

    Raises:
      UserError: if a port cannot be used.
    """
    if port == worker_port:
        raise UserError(f"port and worker_port are both {port}: choose another for one of them")
    for name, number in (("port", port), ("worker_port", worker_port)):
        check_free(name, number)
    keep_freed_memory()
    with_resize_kernel(DataOptions())  # It is known to TensorFlow from then on, if it can be had.
    service = tf.data.experimental.service
    try:
        dispatcher = service.DispatchServer(
            service.DispatcherConfig(
                port=port,
                protocol=_PROTOCOL,
                job_gc_check_interval_ms=_FORGET_AFTER,
                job_gc_timeout_ms=_FORGET_AFTER,
            )
        )
        worker = service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=f"localhost:{port}",
                worker_address=f"{host}:%port%",
                port=worker_port,
                protocol=_PROTOCOL,
            )
        )
    except tf.errors.OpError as error:
        raise UserError(f"the input server cannot start: {error.message}") from error
    yield f"{host}:{port}"
    del worker, dispatcher  # which ends them


def servers_of(servers: tuple[str, ...], pipelines: int, pipeline: int) -> tuple[str, ...]:
    """Returns the servers that an input pipeline uses: its share, or one that others use, too."""
    return servers[pipeline % len(servers) :: pipelines]


def check_servers(servers: tuple[str, ...], trial: Callable[[], tf.data.Dataset]) -> None:
    """Checks that servers are there and can do their part.

    Args:
      servers: their addresses.
      trial: makes a dataset of one element, which takes all that a server may lack.

    Raises:
      UserError: if one does not answer, or cannot give the element, within seconds.
    """
    for server in servers:
        reason = unreachable(server)
        if reason:
            raise UserError(
                f"input server {server} cannot be reached ({reason}): start `imagenet-fast "
                f"input-server --port={server.rpartition(':')[2]}` there, or correct "
                "--input_servers"
            )
        _try(server, trial)


def _try(server: str, trial: Callable[[], tf.data.Dataset]) -> None:
    outcome: queue.SimpleQueue[tf.errors.OpError | None] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            list(trial().apply(_made_by(server)))
            outcome.put(None)
        except tf.errors.OpError as error:
            outcome.put(error)

    # tf.data service asks for ever; a thread can be left behind.
    threading.Thread(target=attempt, daemon=True).start()
    try:
        error = outcome.get(timeout=_TRIAL_WITHIN)
    except queue.Empty:
        raise UserError(
            f"input server {server} answers, but has done nothing for {_TRIAL_WITHIN:.0f} s: is "
            "it an `imagenet-fast input-server`, started with a --host by which this machine "
            "reaches it?"
        ) from None
    if error:
        raise UserError(
            f"input server {server} cannot do its part ({error.message}): it needs the same "
            "version of all packages, data_dir at the same path, and a C++ compiler, unless "
            "--resize_kernel=tensorflow"
        ) from error


def batches_from_servers(
    order: tf.data.Dataset,
    make: Callable[[tf.data.Dataset], tf.data.Dataset],
    servers: tuple[str, ...],
    watched: bool,
) -> tf.data.Dataset:
    """Returns ``make(order)``, element by element, but made by input servers.

    Args:
      order: batches, without end; what gives them must not use Python.
      make: makes another batch of each batch; likewise.
      servers: their addresses, which :func:`check_servers` has checked.
      watched: whether to look whether they are still there, which takes Python and
        :func:`can_watch`. Else the dataset waits forever for one that is unavailable.

    Raises (in the dataset):
      UserError: if a server is unavailable.
      tf.errors.OpError: if a server has been started anew, or lost a batch, so that the stream
        would not be the same; and for what went wrong in a server.
    """
    streams = []
    for number, server in enumerate(servers):
        own = make(order.shard(len(servers), number)).enumerate().prefetch(_BATCHES_AHEAD)
        streams.append(own.apply(_made_by(server)).prefetch(_BATCHES_AHEAD))
    turns = tf.data.Dataset.range(len(servers)).repeat()
    batches = tf.data.Dataset.choose_from_datasets(streams, turns)
    if watched:
        batches = _watched(batches, servers)

    def checked(place: tf.Tensor, numbered: tuple[tf.Tensor, Any]) -> Any:
        number, batch = numbered
        message = "an input server has lost or repeated a batch"
        with tf.control_dependencies(
            [tf.debugging.assert_equal(number, place // len(servers), message)]
        ):
            return tf.nest.map_structure(tf.identity, batch)

    places = tf.data.Dataset.range(tf.int64.max)
    return tf.data.Dataset.zip((places, batches)).map(checked)


def _made_by(server: str) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Returns what has a server make the elements of a dataset, in order."""
    return tf.data.experimental.service.distribute(
        processing_mode=tf.data.experimental.service.ShardingPolicy.OFF,
        service=f"{_PROTOCOL}://{server}",
        compression=None,  # Pixels do not get much smaller.
    )


def _watched(batches: tf.data.Dataset, servers: tuple[str, ...]) -> tf.data.Dataset:
    """Returns the same batches, but raises an error when a server has become unreachable.

    tf.data service would wait forever. A second dataset, without elements, therefore checks the
    servers, and is interleaved with the batches in nondeterministic order. A Python thread could
    only log the error: the training thread waits inside TensorFlow, where nothing interrupts it.
    """

    def look() -> bool:
        for server in servers:
            reason = unreachable(server)
            if reason:
                raise UserError(f"input server {server} is unavailable ({reason}): restart it")
        return False

    def nothing(_: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(look, [], tf.bool), [])

    def zeros(_: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        return tf.nest.map_structure(
            lambda part: tf.zeros(part.shape, part.dtype), batches.element_spec
        )

    looks = _slowly(tf.data.Dataset.range(tf.int64.max), _LOOK_EVERY)
    watch = looks.filter(nothing).map(zeros)
    both = tf.data.Dataset.from_tensors(batches).concatenate(tf.data.Dataset.from_tensors(watch))
    return both.interleave(
        lambda dataset: dataset, cycle_length=2, num_parallel_calls=2, deterministic=False
    )


def can_watch() -> bool:
    """Returns whether datasets of this process can be interleaved in whatever order they come.

    Not after ``tf.config.experimental.enable_op_determinism``, of which only this tells.
    """
    try:
        tf.random.Generator.from_non_deterministic_state()
    except RuntimeError:
        return False
    return True


def _slowly(dataset: tf.data.Dataset, seconds: float) -> tf.data.Dataset:
    """Returns the same dataset with a pause before each element, in which no thread is busy."""
    spec = dataset.element_spec
    slow = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        sleep_microseconds=int(seconds * 1e6),
        output_types=[part.dtype for part in tf.nest.flatten(spec)],
        output_shapes=[part.shape for part in tf.nest.flatten(spec)],
    )
    return tf.data.experimental.from_variant(slow, spec)
