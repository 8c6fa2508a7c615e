"""A process for checks, which may crash or hang: requests are lines, answers JSON.

The first line is a JSON object of ``config``, as JSON text, and ``cluster``, whether the process
joins the cluster that it is started in. The answer is an object of ``workers``, their number in
that cluster, 1 without one, and ``findings`` about the options that choose devices; the checks
ignore wrong ones. Each further line names a check of ``CHECKS``; the answer is its findings.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from typing import IO, Any

from imagenet_fast.base.errors import UserError, first_line, module_missing
from imagenet_fast.base.worker_process import end_with_parent
from imagenet_fast.config import Config
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.doctor.finding import Finding, refused, wrong

# The checks of a process by itself, in their order. Making strategies comes before anything else
# that starts TensorFlow's devices.
CHECKS = {
    "packages": "imagenet_fast.doctor.versions:check_packages",
    "CUDA": "imagenet_fast.doctor.versions:check_cuda",
    "devices": "imagenet_fast.doctor.devices:check_devices",
    "all-reduce": "imagenet_fast.doctor.all_reduce:check_devices",
    "kernels": "imagenet_fast.doctor.kernels:check_kernels",
    "convolutions": "imagenet_fast.doctor.convolution:check_convolutions",
    "resize": "imagenet_fast.doctor.native:check_resize",
    "temporary files": "imagenet_fast.doctor.files:check_temporary_files",
    "model_dir": "imagenet_fast.doctor.files:check_model_dir",
    "data_dir": "imagenet_fast.doctor.files:check_data_dir",
}
# The check that all workers of a cluster run together.
CLUSTER_CHECK = "cluster"
_ALL = {**CHECKS, CLUSTER_CHECK: "imagenet_fast.doctor.all_reduce:check_cluster"}
_CLUSTER_VARIABLES = ("TF_CONFIG", "SLURM_STEP_NUM_TASKS")


def main() -> None:
    """Answers each line of the input."""
    end_with_parent()
    # Answers go to the original stdout; what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    config = Config.from_json(job["config"])
    # Otherwise TensorFlow takes all of a GPU's memory, which other processes may use.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    try:
        import_tensorflow()
    except UserError as error:
        sys.exit(str(error))
    except ModuleNotFoundError as error:
        sys.exit(str(module_missing(error)))
    if job["cluster"]:
        _answer(answers, {})
    else:
        workers, config, findings = choose_devices(config)
        values = [dataclasses.asdict(finding) for finding in findings]
        _answer(answers, {"workers": workers, "findings": values})
    for line in sys.stdin:
        findings = run_check(line.strip(), config)
        _answer(answers, [dataclasses.asdict(finding) for finding in findings])


def choose_devices(config: Config) -> tuple[int, Config, list[Finding]]:
    """Chooses this process' devices as training would.

    Returns:
      The number of the cluster's workers, 1 without a cluster; the options without wrong ones; and
      findings about these.
    """
    from imagenet_fast.distribute.cluster import Cluster
    from imagenet_fast.distribute.gpus import use_gpus
    from imagenet_fast.distribute.strategy import NO_CLUSTER

    cluster, findings = None, []
    try:
        cluster = Cluster.from_environment()
        if cluster is None and config.strategy == "multi_worker":
            raise UserError(NO_CLUSTER)
    except UserError as error:
        findings.append(refused(CLUSTER_CHECK, error, "fix what starts the workers"))
    try:
        use_gpus(config.gpus, cluster)
    except UserError as error:
        findings.append(refused("gpus", error))
        config = config.replace(gpus="")
    for name in _CLUSTER_VARIABLES:
        os.environ.pop(name, None)
    return len(cluster.workers) if cluster else 1, config, findings


def run_check(name: str, config: Config) -> list[Finding]:
    """Returns a check's findings; an error that it raises becomes one."""
    module, _, function = _ALL[name].partition(":")
    try:
        return getattr(importlib.import_module(module), function)(config)
    except UserError as error:
        return [refused(name, error)]
    except Exception as error:  # Whatever it is, the other checks must run.
        return [wrong(name, f"{type(error).__name__}: {first_line(error)}")]


def _answer(answers: IO[str], value: Any) -> None:
    print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    main()
