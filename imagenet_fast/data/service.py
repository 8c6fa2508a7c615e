"""Input servers: machines that make training batches by tf.data service, in the same order.

Each input server has its own dispatcher and worker. Of W servers, server i makes batches i, i + W,
i + 2W and so on, and the trainer takes batches from the servers in turn. Each server reads all
records that the host trains on, but decodes only those of its batches.

Servers cannot call the Python functions of the training process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from imagenet_fast.base.addresses import LOOPBACK, check_free, join, own_addresses, unreachable
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.data.malloc import keep_freed_memory
from imagenet_fast.data.options import DataOptions
from imagenet_fast.distribute.reachable import restricted

_PROTOCOL = "grpc"
# Prefetched by each server, and from each server by the training host.
_BATCHES_AHEAD = 2
# Time limit of a server's trial, and interval between checks of the servers, in seconds.
_TRIAL_TIMEOUT = 30.0
_CHECK_INTERVAL = 1.0
# Milliseconds after which a server releases the datasets of a run that has ended.
_JOB_TIMEOUT = 10_000


@contextlib.contextmanager
def input_server(
    port: int, host: str = LOOPBACK, worker_port: int = 0, *, trusted_network: bool = False
) -> Iterator[str]:
    """Serves batches to training runs, in threads, until the context ends.

    Without a password: prints who can reach the ports, and so run any TensorFlow operation here.

    Args:
      port: of the dispatcher, to which training runs connect.
      host: name or address of this machine at which they reach it, if they run on others. Nobody
        reaches the ports at any address but this and the loopback.
      worker_port: from which they fetch batches; 0: any free port.
      trusted_network: whether to serve even if this system cannot restrict the ports.

    Yields:
      The address ``host:port``, as in ``Config.input_servers``.

    Raises:
      UserError: if a port cannot be used or restricted, or ``host`` is not this machine.
    """
    addresses = own_addresses(host)
    if port == worker_port:
        raise UserError(f"port and worker_port are both {port}: give two different ports")
    for name, number in (("port", port), ("worker_port", worker_port)):
        check_free(name, number)
    keep_freed_memory()
    with_resize_kernel(DataOptions())  # loads the native op into TensorFlow, if available
    service = tf.data.experimental.service
    with restricted((port, worker_port), addresses, trusted_network=trusted_network) as reach:
        try:
            dispatcher = service.DispatchServer(
                service.DispatcherConfig(
                    port=port,
                    protocol=_PROTOCOL,
                    job_gc_check_interval_ms=_JOB_TIMEOUT,
                    job_gc_timeout_ms=_JOB_TIMEOUT,
                )
            )
            worker = service.WorkerServer(
                service.WorkerConfig(
                    dispatcher_address=f"localhost:{port}",
                    worker_address=join(host, "%port%"),
                    port=reach.ports[1],
                    protocol=_PROTOCOL,
                )
            )
        except tf.errors.OpError as error:
            raise UserError(f"the input server cannot start: {error.message}") from error
    warn_once(reach.notice())
    yield join(host, port)
    del worker, dispatcher  # which ends them


def servers_of(servers: tuple[str, ...], pipelines: int, pipeline: int) -> tuple[str, ...]:
    """Returns the servers of an input pipeline; pipelines share servers if there are fewer."""
    return servers[pipeline % len(servers) :: pipelines]


def check_servers(servers: tuple[str, ...], trial: Callable[[], tf.data.Dataset]) -> None:
    """Checks that servers are reachable and able to make batches.

    ``trial`` returns a dataset of one element that needs everything that a server may lack.

    Raises:
      UserError: if a server is unreachable, or does not return the element in time.
    """
    for server in servers:
        reason = unreachable(server)
        if reason:
            host, _, port = server.rpartition(":")
            raise UserError(
                f"input server {server} cannot be reached ({reason}): start `imagenet-fast "
                f"input-server --port={port} --host={host.strip('[]')}` there, or correct "
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

    # In a thread, which can be abandoned, because tf.data service retries forever.
    threading.Thread(target=attempt, daemon=True).start()
    try:
        error = outcome.get(timeout=_TRIAL_TIMEOUT)
    except queue.Empty:
        raise UserError(
            f"input server {server} is reachable, but made no batch in {_TRIAL_TIMEOUT:.0f} s: is "
            "it an `imagenet-fast input-server`, started with a --host by which this machine "
            "reaches it?"
        ) from None
    if error:
        raise UserError(
            f"input server {server} cannot make batches ({error.message}): it needs the same "
            "versions of all packages, data_dir at the same path, and a C++ compiler unless "
            "--resize_kernel=tensorflow"
        ) from error


def batches_from_servers(
    order: tf.data.Dataset,
    make: Callable[[tf.data.Dataset], tf.data.Dataset],
    servers: tuple[str, ...],
    watched: bool,
) -> tf.data.Dataset:
    """Returns the elements of ``make(order)``, made by input servers.

    Args:
      order: infinitely many batches; must not call Python.
      make: maps each batch to another; must not call Python either.
      servers: addresses, already checked by :func:`check_servers`.
      watched: whether to check that servers stay reachable, which needs Python and
        :func:`can_watch`. Otherwise the dataset waits forever for an unavailable server.

    Raises (in the dataset):
      UserError: if a server is unavailable.
      tf.errors.OpError: if a server was restarted or lost a batch, so the batches would differ, or
        failed.
    """
    streams = []
    for number, server in enumerate(servers):
        stream = make(order.shard(len(servers), number)).enumerate().prefetch(_BATCHES_AHEAD)
        streams.append(stream.apply(_made_by(server)).prefetch(_BATCHES_AHEAD))
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
    """Returns a transformation that runs a dataset on a server, with elements in order."""
    return tf.data.experimental.service.distribute(
        processing_mode=tf.data.experimental.service.ShardingPolicy.OFF,
        service=f"{_PROTOCOL}://{server}",
        compression=None,  # pixels hardly compress
    )


def _watched(batches: tf.data.Dataset, servers: tuple[str, ...]) -> tf.data.Dataset:
    """Returns the same batches, but raises an error when a server has become unreachable.

    tf.data service would wait forever. A second dataset, without elements, therefore checks the
    servers, and is interleaved with the batches in nondeterministic order. A Python thread could
    only log the error: the training thread waits inside TensorFlow, where nothing interrupts it.
    """

    def check() -> bool:
        for server in servers:
            reason = unreachable(server)
            if reason:
                raise UserError(f"input server {server} is unavailable ({reason}): restart it")
        return False

    def nothing(_: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(check, [], tf.bool), [])

    def zeros(_: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        return tf.nest.map_structure(
            lambda part: tf.zeros(part.shape, part.dtype), batches.element_spec
        )

    checks = _slowly(tf.data.Dataset.range(tf.int64.max), _CHECK_INTERVAL)
    watch = checks.filter(nothing).map(zeros)
    both = tf.data.Dataset.from_tensors(batches).concatenate(tf.data.Dataset.from_tensors(watch))
    return both.interleave(
        lambda dataset: dataset, cycle_length=2, num_parallel_calls=2, deterministic=False
    )


def can_watch() -> bool:
    """Returns whether nondeterministic interleaving is allowed in this process.

    It is not after ``tf.config.experimental.enable_op_determinism``, which only this call reveals.
    """
    try:
        tf.random.Generator.from_non_deterministic_state()
    except RuntimeError:
        return False
    return True


def _slowly(dataset: tf.data.Dataset, seconds: float) -> tf.data.Dataset:
    """Returns the dataset with a pause before each element that occupies no thread."""
    spec = dataset.element_spec
    slow = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        sleep_microseconds=int(seconds * 1e6),
        output_types=[part.dtype for part in tf.nest.flatten(spec)],
        output_shapes=[part.shape for part in tf.nest.flatten(spec)],
    )
    return tf.data.experimental.from_variant(slow, spec)
