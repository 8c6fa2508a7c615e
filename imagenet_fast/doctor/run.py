"""Runs all checks in separate processes: a crash or hang of one does not end the others."""

from __future__ import annotations

from collections.abc import Iterator

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.worker_process import WorkerTimeout, module_command, start_worker
from imagenet_fast.config import Config
from imagenet_fast.doctor.finding import Finding, refused, wrong
from imagenet_fast.doctor.worker import CHECKS, CLUSTER_CHECK

_COMMAND = module_command("imagenet_fast.doctor.worker")
_START = "TensorFlow"
_CRASHED = "the lines above may say why; the other checks go on without it"


def examine(config: Config, timeout_seconds: float) -> Iterator[Finding]:
    """Yields the findings of all checks, each as soon as it is there, in a time limit."""
    job = {"config": config.to_json(), "cluster": False}
    names = list(CHECKS)
    name, workers = _START, 0
    while names:
        started = False
        try:
            with start_worker(
                _COMMAND, job, name="the check", limit_seconds=timeout_seconds
            ) as worker:
                started = True
                if not workers:
                    workers = worker.answer["workers"]
                    yield from (Finding(**values) for values in worker.answer["findings"])
                while names:
                    name = names.pop(0)
                    yield from (Finding(**values) for values in worker.ask(name))
        except UserError as error:
            if started:
                yield wrong(name, str(error), _CRASHED)
                continue
            if workers:  # Whatever ended the last process, such as a lost GPU, ends others.
                found = f"does not start again after {name}: {error}"
                yield wrong(_START, found, f"not checked: {', '.join(names)}")
            else:
                yield refused(_START, error)
            return
    if workers > 1 and config.strategy in ("auto", "multi_worker"):
        yield from _examine_cluster(config, timeout_seconds)


def _examine_cluster(config: Config, timeout_seconds: float) -> Iterator[Finding]:
    """Yields the findings of the check that all workers run together."""
    job = {"config": config.to_json(), "cluster": True}
    try:
        with start_worker(_COMMAND, job, name="the check", limit_seconds=timeout_seconds) as worker:
            yield from (Finding(**values) for values in worker.ask(CLUSTER_CHECK))
    except WorkerTimeout:
        found = f"after {timeout_seconds:g} s still {_waiting()}"
        advice = (
            "start this command on all workers at once, and let each reach the others' ports; "
            "--timeout waits longer"
        )
        yield wrong(CLUSTER_CHECK, found, advice)
    except UserError as error:
        yield wrong(CLUSTER_CHECK, str(error), "see the output of the other workers")


def _waiting() -> str:
    """Returns which workers this one is waiting for."""
    # Imported here, since reading Slurm's variables imports TensorFlow.
    from imagenet_fast.distribute.cluster import Cluster
    from imagenet_fast.distribute.waiting import waiting_message

    cluster = Cluster.from_environment()
    assert cluster  # There are several workers.
    others = [f"{n}={address}" for n, address in enumerate(cluster.workers) if n != cluster.index]
    return waiting_message(others)
