"""The worker processes of a job, as ``TF_CONFIG`` or Slurm names them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping

from imagenet_fast.base.addresses import LAST_PORT
from imagenet_fast.base.errors import UserError

_EXAMPLE = (
    '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_ADDRESS = re.compile(r".+:[0-9]+")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a synchronous job.

    Attributes:
      workers: ``host:port`` of each, in the order of their indices; the chief is the first.
      index: this process' place among them.
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
        """The host of each process, in the order of their indices."""
        return [worker.rpartition(":")[0] for worker in self.workers]

    def place_on_host(self) -> tuple[int, int]:
        """Returns this process' number among those of its host, from 0, and how many they are."""
        return self.hosts[: self.index].count(self.host), self.hosts.count(self.host)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Cluster | None:
        """Returns the cluster that ``TF_CONFIG``, else Slurm's variables describe, else None.

        Raises:
          UserError: if either is malformed.
        """
        return cls.from_tf_config(environment) or cls.from_slurm(environment)

    @classmethod
    def from_tf_config(cls, environment: Mapping[str, str]) -> Cluster | None:
        """Reads TensorFlow's ``TF_CONFIG``; a ``chief`` counts as the first worker.

        Raises:
          UserError: if it is not what TensorFlow documents, or has parameter servers.
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
        own = chiefs if kind == "chief" else workers
        if not isinstance(index, int) or not 0 <= index < len(own):
            raise UserError(
                f"TF_CONFIG's task index is {index!r}, but must count the {len(own)} {kind}s from 0"
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
        """Reads the variables that ``srun`` sets, if they name more than one task.

        The tasks of one host listen on consecutive ports from ``port`` on.

        Raises:
          UserError: if they cannot be read or contradict each other.
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
        # TensorFlow's readers of Slurm's two shorthands. Its SlurmClusterResolver orders hosts by
        # name where Slurm orders tasks by the list (node10 before node2), and needs GPUs.
        from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import (
            expand_hostlist,
            expand_tasks_per_node,
        )

        try:
            hosts = expand_hostlist(environment["SLURM_STEP_NODELIST"])
            counts = expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
            index = int(environment["SLURM_PROCID"])
            tasks = int(environment["SLURM_STEP_NUM_TASKS"])
        except ValueError as error:
            raise UserError(f"cannot read Slurm's variables: {error}") from None
        workers = tuple(
            f"{host}:{port + task}" for host, count in zip(hosts, counts) for task in range(count)
        )
        if len(hosts) != len(counts) or len(workers) != tasks or not 0 <= index < tasks:
            told = ", ".join(f"{name}={environment[name]}" for name in names)
            raise UserError(f"Slurm's variables contradict each other: {told}")
        node = environment.get("SLURMD_NODENAME", "")
        if node and workers[index].rpartition(":")[0] != node:
            raise UserError(
                f"Slurm has put task {index} on {node}, but tasks must be numbered node by node: "
                "start them with srun --distribution=block"
            )
        return cls(workers, index, tasks_share_gpus=True)

    def to_tf_config(self) -> str:
        """Returns the ``TF_CONFIG`` that describes this cluster to this process."""
        return json.dumps(
            {
                "cluster": {"worker": list(self.workers)},
                "task": {"type": "worker", "index": self.index},
            }
        )
