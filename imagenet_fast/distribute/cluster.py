"""The worker processes of a job, from ``TF_CONFIG`` or Slurm's variables."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from imagenet_fast.base.addresses import LAST_PORT
from imagenet_fast.base.errors import UserError

_EXAMPLE = (
    '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_ADDRESS = re.compile(r".+:[0-9]+")
_MOST_HOSTS = 100_000
# The indices of the workers that take part, separated by commas; without it, all do.
TAKING_PART = "IMAGENET_FAST_WORKERS"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The worker processes of a job.

    Attributes:
      workers: each worker's ``host:port``, in the order of indices; the first is the chief.
      index: the index of this process.
      tasks_share_gpus: whether the processes of one host see the same GPUs, as Slurm's tasks do.
    """

    workers: tuple[str, ...]
    index: int
    tasks_share_gpus: bool = dataclasses.field(default=False, compare=False, repr=False)

    @property
    def host(self) -> str:
        """The host of this process."""
        return self.hosts[self.index]

    @property
    def hosts(self) -> list[str]:
        """The host of each process, in the order of indices."""
        return [worker.rpartition(":")[0] for worker in self.workers]

    def place_on_host(self) -> tuple[int, int]:
        """Returns the index of this process among those of its host, and their number."""
        return self.hosts[: self.index].count(self.host), self.hosts.count(self.host)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Cluster | None:
        """Returns the cluster of ``TF_CONFIG``, else of Slurm's variables, else None.

        With ``IMAGENET_FAST_WORKERS``, which a supervisor sets, it has only those workers.

        Raises:
          UserError: if they are malformed.
        """
        cluster = cls.from_tf_config(environment) or cls.from_slurm(environment)
        text = environment.get(TAKING_PART, "")
        if cluster is None or not text:
            return cluster
        indices = [int(part) if part.isdecimal() else -1 for part in text.split(",")]
        places = range(len(cluster.workers))
        if indices != sorted({*indices}.intersection(places)) or cluster.index not in indices:
            raise UserError(
                f"{TAKING_PART} is {text!r}, but must have ascending indices of the job's "
                f"{len(places)} workers, among them {cluster.index}, this one's"
            )
        return dataclasses.replace(
            cluster,
            workers=tuple(cluster.workers[index] for index in indices),
            index=indices.index(cluster.index),
        )

    @classmethod
    def from_tf_config(cls, environment: Mapping[str, str]) -> Cluster | None:
        """Reads TensorFlow's ``TF_CONFIG``; a ``chief`` counts as the first worker.

        Raises:
          UserError: if it does not have TensorFlow's documented format, or has parameter servers.
        """
        text = environment.get("TF_CONFIG", "")
        if not text:
            return None
        try:
            config = json.loads(text)
        except ValueError as error:
            raise UserError(f"TF_CONFIG is not JSON ({error}); expected e.g. {_EXAMPLE}") from None
        try:
            jobs, kind, index = config["cluster"], config["task"]["type"], config["task"]["index"]
            members = {job: list(jobs[job]) for job in jobs}
        except KeyError as error:
            raise UserError(f"TF_CONFIG lacks {error}; expected e.g. {_EXAMPLE}") from None
        except TypeError:
            raise UserError(f"TF_CONFIG is {text}; expected e.g. {_EXAMPLE}") from None
        unknown = sorted(set(members) - {"chief", "worker", "evaluator"})
        if unknown:
            raise UserError(
                f"TF_CONFIG has the job {unknown[0]!r}: training is synchronous and has only "
                "workers (and at most one chief)"
            )
        if kind not in ("chief", "worker"):
            raise UserError(f"TF_CONFIG's task type is {kind!r}, but must be chief or worker")
        chiefs, workers = members.get("chief", []), members.get("worker", [])
        tasks = len(chiefs if kind == "chief" else workers)
        if not isinstance(index, int) or not 0 <= index < tasks:
            raise UserError(
                f"TF_CONFIG's task index is {index!r}, but must be in [0, {tasks}): it has "
                f"{tasks} {kind}(s)"
            )
        everyone = (*chiefs, *workers)
        for address in everyone:
            if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
                raise UserError(f"TF_CONFIG names {address!r}, which is not host:port")
            if not 0 < int(address.rpartition(":")[2]) <= LAST_PORT:
                raise UserError(
                    f"TF_CONFIG names {address!r}, whose port is not between 1 and {LAST_PORT}"
                )
        if len(set(everyone)) != len(everyone):
            raise UserError("TF_CONFIG names the same host:port twice")
        return cls(everyone, index if kind == "chief" else len(chiefs) + index)

    @classmethod
    def from_slurm(cls, environment: Mapping[str, str], port: int = 8888) -> Cluster | None:
        """Reads the variables that ``srun`` sets; None for a single task.

        The tasks of one host listen on consecutive ports, starting at ``port``.

        Raises:
          UserError: if the variables are malformed or contradict each other.
        """
        if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
            return None
        names = (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_TASKS_PER_NODE",
        )
        missing = [name for name in names if name not in environment]
        if missing:
            raise UserError(f"Slurm's {missing[0]} is not set: start the tasks with srun")
        # TensorFlow's parser. Its SlurmClusterResolver is no alternative: it sorts hosts by name,
        # unlike Slurm (node10 before node2), and needs GPUs; its parser of hosts allows one range
        # at the end of a name only.
        from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import (
            expand_tasks_per_node,
        )

        try:
            hosts = hosts_of(environment["SLURM_STEP_NODELIST"])
            counts = expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
            index = int(environment["SLURM_PROCID"])
            tasks = int(environment["SLURM_STEP_NUM_TASKS"])
        except ValueError as error:
            raise UserError(f"cannot read Slurm's variables: {error}") from None
        workers = tuple(
            f"{host}:{port + task}" for host, count in zip(hosts, counts) for task in range(count)
        )
        if len(hosts) != len(counts) or len(workers) != tasks or not 0 <= index < tasks:
            values = ", ".join(f"{name}={environment[name]}" for name in names)
            raise UserError(f"Slurm's variables contradict each other: {values}")
        node = environment.get("SLURMD_NODENAME", "")
        if node and workers[index].rpartition(":")[0] != node:
            raise UserError(
                f"Slurm started task {index} on {node}, but tasks must be numbered node by node: "
                "use srun --distribution=block"
            )
        return cls(workers, index, tasks_share_gpus=True)


def place_of(resolver: Any) -> tuple[int, int]:
    """Returns the number of worker processes of a resolver, and the index of this one.

    A chief is the first. None: there is one process.
    """
    jobs = resolver.cluster_spec().as_dict() if resolver is not None else {}
    chiefs, workers = (len(jobs.get(job, ())) for job in ("chief", "worker"))
    if chiefs + workers < 2:
        return 1, 0
    return chiefs + workers, resolver.task_id + (chiefs if resolver.task_type == "worker" else 0)


def hosts_of(nodelist: str) -> list[str]:
    """Returns the hosts of a list by Slurm, such as ``rack[0-1]_blade[08-10],login.example``.

    The last of several ranges in a name counts first, as in ``scontrol show hostnames``.

    Raises:
      ValueError: if it is no such list.
    """
    hosts: list[str] = []
    # Commas within brackets separate numbers.
    for name in re.split(r",(?![^\[]*\])", nodelist):
        parts = re.split(r"\[([0-9,-]+)\]", name)
        if not name or not re.fullmatch(r"[\w.-]*", "".join(parts[::2])):
            raise ValueError(f"not a list of hosts: {nodelist!r}")
        choices = [[part] if index % 2 == 0 else _numbers(part) for index, part in enumerate(parts)]
        if len(hosts) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise ValueError(f"more than {_MOST_HOSTS:,} hosts: {nodelist[:100]!r}")
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Returns the numbers of ranges such as ``1,08-10``, with their leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not low <= high < low + _MOST_HOSTS:
            raise ValueError(f"not a range of hosts: {part!r}")
        numbers += (f"{number:0{len(first)}}" for number in range(low, high + 1))
    return numbers
