"""The devices of a pipeline's stages: this process' own, and those of stage servers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from imagenet_fast.base.addresses import (
    LOOPBACK,
    check_free,
    join,
    local_address,
    own_addresses,
    unreachable,
)
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.distribute.reachable import restricted

# Of the servers, and of the process that trains with them.
_SERVERS, _TRAINER = "stage", "trainer"
_PROTOCOL = "grpc"


def available_devices(servers: Sequence[str] = (), *, on_cpus: bool = False) -> list[str]:
    """Returns the names of the devices for a pipeline's stages, in order.

    First this process' GPUs or, without any, its CPUs
    (``tf.config.set_logical_device_configuration``); then those of each server.

    Args:
      servers: ``host:port`` of each :func:`start_stage_server`; to be called with them before
        TensorFlow creates anything in this process.
      on_cpus: whether to use this process' CPUs even if it has GPUs.

    Raises:
      UserError: if a server cannot be reached.
    """
    if servers:
        _connect(tuple(servers))
    with tf.device("CPU:0"):
        here = tf.DeviceSpec.from_string(tf.zeros([]).device)
    found = _devices(here.job, here.task, ("CPU",) if on_cpus else ("GPU", "CPU"))
    for task in range(len(servers)):
        found += _devices(_SERVERS, task)
    return found


def stage_devices(count: int, servers: Sequence[str] = (), *, on_cpus: bool = False) -> list[str]:
    """Returns the first ``count`` devices of :func:`available_devices`.

    Raises:
      UserError: if a server cannot be reached, or there are fewer devices.
    """
    found = available_devices(servers, on_cpus=on_cpus)
    if len(found) < count:
        raise UserError(
            f"the pipeline needs {count} devices, but there are {len(found)}: use fewer stages, "
            "start an `imagenet-fast stage-server` on other machines and name them in "
            "pipeline_servers, or split the CPU with logical_cpus (in Python: "
            "tf.config.set_logical_device_configuration)"
        )
    return found[:count]


def full_device_name(device: str) -> str:
    """Returns a device's name with job, task, type and number."""
    with tf.init_scope(), tf.device(device):
        return tf.zeros([]).device


def start_stage_server(port: int, host: str = LOOPBACK, *, trusted_network: bool = False) -> str:
    """Lends this process' devices to the pipelines of other processes, in threads.

    Without a password: prints who can reach the port, and so run any TensorFlow operation here.

    Args:
      port: on which it listens.
      host: name or address of this machine at which other machines reach it. Nobody reaches the
        port at any address but this and the loopback.
      trusted_network: whether to serve even if this system cannot restrict the port.

    Returns:
      The address ``host:port``, as in ``pipeline_servers``.

    Raises:
      UserError: if the port cannot be used or restricted, or ``host`` is not this machine.
    """
    addresses = own_addresses(host)
    check_free("port", port)
    with restricted([port], addresses, trusted_network=trusted_network) as reach:
        server = tf.distribute.Server(
            {_SERVERS: [f"localhost:{port}"]}, job_name=_SERVERS, task_index=0, protocol=_PROTOCOL
        )
    _RUNNING.append(server)
    warn_once(reach.notice())
    return join(host, port)


# Servers end with the objects.
_RUNNING: list[tf.distribute.Server] = []


@functools.cache
def _connect(servers: tuple[str, ...]) -> None:
    for server in servers:
        reason = unreachable(server)
        if reason:
            host, _, port = server.rpartition(":")
            raise UserError(
                f"stage server {server} cannot be reached ({reason}): start `imagenet-fast "
                f"stage-server --port={port} --host={host.strip('[]')}` there, or correct "
                "pipeline_servers"
            )
    # The servers send each other, and this process, what one stage passes to the next. This process
    # must listen for it even where ports cannot be restricted.
    here = local_address(servers[0])
    with restricted([0], [here], trusted_network=True) as reach:
        address = join(here, reach.ports[0])
        spec = tf.train.ClusterSpec({_TRAINER: [address], _SERVERS: list(servers)})
        tf.config.experimental_connect_to_cluster(
            spec, job_name=_TRAINER, task_index=0, protocol=_PROTOCOL
        )
        # Else TensorFlow listens when it is first used, outside of the context.
        tf.config.list_logical_devices()
    if reach.addresses != ():
        warn_once(reach.notice())


def _devices(job: str, task: int, kinds: Sequence[str] = ("GPU", "CPU")) -> list[str]:
    """Returns a process' devices of the first of these kinds that it has."""
    for kind in kinds:
        names = [
            tf.DeviceSpec.from_string(device.name)
            for device in tf.config.list_logical_devices(kind)
        ]
        matching = [
            name.replace(job=job, replica=0, task=task).to_string()
            for name in names
            if (name.job or job, name.task or 0) == (job, task)
        ]
        if matching:
            return matching
    return []
