"""Runs a command in each worker's namespace."""

from __future__ import annotations

import json
import os

import launch_local

from network_lab.lab import Lab
from network_lab.layout import Layout
from network_lab.namespaces import ENDING_SIGNALS

PORT = 2222
_NAMESPACE = "NETWORK_LAB_NAMESPACE"
# All workers run the same command; the environment names each one's namespace.
_ENTER = ("sh", "-c", f'exec ip netns exec "${_NAMESPACE}" "$@"', "sh")


def environments(layout: Layout, names: list[str]) -> list[dict[str, str]]:
    """Returns the environment of each worker: that of ``launch_local.py`` with other addresses.

    Args:
      layout: the workers.
      names: their namespaces.

    Raises:
      launch_local.LaunchError: if there are GPUs, but fewer than workers.
    """
    hosts = [layout.address(worker) for worker in range(layout.workers)]
    addresses = [f"{host}:{PORT}" for host in hosts]
    made = launch_local.worker_environments([PORT] * layout.workers, os.environ)
    for worker, environment in enumerate(made):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
        environment["TF_CONFIG"] = json.dumps(task)
        environment[_NAMESPACE] = names[worker]
        # gRPC would connect to the other workers through a proxy.
        for name in ("no_proxy", "NO_PROXY"):
            environment[name] = ",".join([environment[name], *hosts])
    return made


def run(lab: Lab, command: list[str], grace: float) -> int:
    """Runs a command in each worker's namespace until all have ended; one failure stops all.

    Args:
      lab: with the namespaces.
      command: to run.
      grace: seconds from SIGTERM to SIGKILL when workers are stopped.

    Returns:
      0, or the exit status of the first failure (128 + n after signal n).

    Raises:
      launch_local.LaunchError: if the workers cannot be started.
    """
    job = launch_local.Job(grace)
    job.end_on(*ENDING_SIGNALS)
    try:
        job.start_workers([*_ENTER, *command], environments(lab.layout, lab.names))
        return job.wait()
    finally:
        job.kill()
