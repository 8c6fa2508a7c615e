"""The Kubernetes manifest and the Slurm batch script pass the right workers."""

import configparser
import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.recipes import find_recipe

ROOT = pathlib.Path(__file__).parents[2]
# A fake imagenet-fast: prints its environment and arguments.
PROGRAM = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([dict(os.environ), sys.argv[1:]]))
"""
# A fake srun with two tasks on one node: starts them with its variables, waits, and fails if one of
# them does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >>"$HOME/options"; shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=gpu1 SLURM_STEP_TASKS_PER_NODE=2
for SLURM_PROCID in 0 1; do
  SLURM_PROCID=$SLURM_PROCID "$@" &
  tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""


@pytest.fixture
def environment(tmp_path):
    for name, text in {"imagenet-fast": PROGRAM, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path)}


def seen(line):
    """Returns the cluster and the arguments that the fake imagenet-fast got."""
    environment, arguments = json.loads(line)
    return Cluster.from_environment(environment), arguments


def manifests():
    """Returns the network policy and the JobSet."""
    return yaml.safe_load_all((ROOT / "gcp" / "gke_jobset.yaml").read_text())


def manifest():
    _, jobset = manifests()
    return jobset


def test_only_the_pods_of_the_jobset_reach_each_other():
    policy, jobset = manifests()
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    # The label that JobSet gives its pods, from which they also read the name.
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}}
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert "hostNetwork" not in pod  # to which policies do not apply


def test_the_manifest_is_consistent():
    jobset = manifest()
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    assert spec["completionMode"] == "Indexed" and job["replicas"] == 1
    assert str(spec["parallelism"]) == str(spec["completions"]) == variables["WORKERS"]["value"]
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_a_lost_worker_comes_back_and_an_error_ends_the_job():
    """Kubernetes starts pods of lost nodes again, but none that ended by an error of its own."""
    jobset = manifest()
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    template = spec["template"]["spec"]
    # What a limit per index and a policy of failures need.
    assert spec["completionMode"] == "Indexed" and template["restartPolicy"] == "Never"
    assert spec["backoffLimitPerIndex"] > 0 and "backoffLimit" not in spec
    lost, error = spec["podFailurePolicy"]["rules"]
    assert lost == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    name = template["containers"][0]["name"]
    # The statuses of a command with a user error, and of Python with a traceback.
    codes = {"containerName": name, "operator": "In", "values": [1, 2]}
    assert error == {"action": "FailJob", "onExitCodes": codes}
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


@pytest.mark.parametrize("index", [0, 1])
def test_each_pod_of_the_manifest_finds_the_others(environment, index):
    jobset = manifest()
    name, (job,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    variables = {"WORKERS": "2", "JOBSET": name, "JOB_COMPLETION_INDEX": str(index)}
    finished = subprocess.run(
        container["command"],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    port = container["ports"][0]["containerPort"]
    hosts = tuple(f"{name}-{job['name']}-0-{worker}.{name}:{port}" for worker in range(2))
    cluster, arguments = seen(finished.stdout)
    assert cluster == Cluster(hosts, index)
    assert arguments[:2] == ["train", "--strategy=multi_worker"]
    assert "--wait_for_hardware=10" in arguments
    assert "--flagfile=facebook_1h_8k" in arguments
    recipe = next(word for word in arguments if "flagfile" in word).partition("=")[2]
    assert find_recipe(recipe)


def test_the_image_contains_only_the_package():
    lines = (ROOT / "gcp" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    held = {rule[1:] for rule in rules if rule.startswith("!")}
    build = {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"}
    assert held == {"imagenet_fast"} | build
    assert all((ROOT / name).exists() for name in held)
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    named = metadata["metadata"]["long_description"].removeprefix("file: ")
    assert {named, metadata["metadata"]["license_files"]} <= build


def test_the_image_finds_the_driver_where_gke_mounts_it():
    lines = (ROOT / "gcp" / "Dockerfile").read_text().splitlines()
    assert "ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in lines


@pytest.mark.parametrize(
    ("more", "srun"),
    [
        ([], ["--kill-on-bad-exit=1"]),
        (["--wait_for_hardware=5"], ["--no-kill", "--kill-on-bad-exit=0"]),
        (["--wait_for_hardware", "5"], ["--no-kill", "--kill-on-bad-exit=0"]),
    ],
)
def test_slurm_tasks_find_each_other(environment, tmp_path, more, srun):
    given = ["--flagfile=digits", "--seed=2", *more]
    finished = subprocess.run(
        ["bash", ROOT / "gcp" / "slurm.sbatch", *given],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    workers = ("gpu1:8888", "gpu1:8889")
    found = sorted(map(seen, finished.stdout.splitlines()), key=lambda task: task[0].index)
    assert found == [(Cluster(workers, index), ["train", *given]) for index in range(2)]
    # By Slurm, tasks of a step end with the first failure, or when a node fails, only if so.
    assert (tmp_path / "options").read_text().split() == srun


def test_a_failing_slurm_task_fails_the_job(environment, tmp_path):
    (tmp_path / "imagenet-fast").write_text("#!/bin/bash\nexit $((SLURM_PROCID * 3))\n")
    finished = subprocess.run(["bash", ROOT / "gcp" / "slurm.sbatch"], env=environment, check=False)
    assert finished.returncode == 3
