"""gcp/tpu against a fake gcloud whose hosts run a fake trainer."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import fake_gcloud
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def words(bench, verb):
    """Returns the command lines that contain a word."""
    return [call for call in bench.changes() if verb in call]


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_shellcheck_has_no_complaints():
    scripts = ["gcp/tpu", "gcp/host/install.sh", "gcp/host/job.sh", "gcp/slurm.sbatch"]
    program = pathlib.Path(sys.executable).with_name("shellcheck")
    finished = subprocess.run(
        [program, "--external-sources", *scripts, "gcp/env.example"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


# The settings.


def test_one_error_lists_all_missing_settings(bench):
    for name in ("ZONE", "NAME", "RUNS_DIR"):
        bench.settings[name] = ""
    output = bench.refused("--yes", "create")
    assert "does not set ZONE NAME RUNS_DIR" in output
    assert bench.cloud.calls() == []


def test_the_example_lacks_what_must_be_filled_in(bench):
    example = ROOT / "gcp" / "env.example"
    output = bench.run(f"--env={example}", "cost", status=1)
    assert "does not set PROJECT ZONE NAME ACCELERATOR_TYPE PROVISIONING DATA_DIR" in output


def test_a_file_that_is_not_there(bench):
    assert "there is no env file" in bench.run("--env=/nowhere.env", "cost", status=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ZONE", "us-central2", "a zone, such as us-central2-b"),
        ("NAME", "My_TPU", "at most 62 of a to z"),
        ("ACCELERATOR_TYPE", "a100-8", "the known TPU types are v2 v3 v4 v5litepod v5p v6e"),
        ("ACCELERATOR_TYPE", "v6e-16", "not known to work on slices of v6e"),
        ("PROVISIONING", "cheap", "spot or on_demand"),
        ("STRATEGY", "mirrored", "tpu or multi_worker"),
        ("DATA_DIR", "data/digits", "gs://BUCKET/FOLDER or an absolute path"),
        ("RECIPE", "digit", "recipes are: airbench96_cifar10 airbench_cifar10 digits "),
        ("RUNTIME_VERSION", "tpu-vm-tf-2.18.0-pod-pjrt", "gcp/stacks/pod.txt has tensorflow-tpu"),
        ("WAIT_MINUTES", "soon", "a number of minutes"),
        ("ADDRESSES", "none", "external or internal"),
        ("NETWORK", "a/b", "the name of a VPC network"),
        ("RUN", "..", "a name of letters, digits, -, _ and ., not at the start"),
        ("ACCELERATOR", "v4-8", "sets ACCELERATOR, which does not exist"),
    ],
)
def test_a_wrong_setting(bench, name, value, message):
    bench.settings[name] = value
    assert message in bench.refused("--yes", "create")
    assert bench.cloud.calls() == []


@pytest.mark.parametrize("place", ["runs/best.flags", "../best.flags"])
def test_a_flagfile_that_would_not_be_sent(bench, place):
    bench.make_data()
    (bench.checkout / "runs").mkdir()
    (bench.checkout / place).touch()
    message = f"{place} would not be sent to the hosts, because git ignores it or it is outside"
    bench.settings["TRAIN_FLAGS"] = f"(--seed=3 --flagfile={place})"
    assert message in bench.refused("--yes", "create")
    bench.settings.update(RECIPE=place, TRAIN_FLAGS="()")
    assert message in bench.refused("--yes", "create")


def test_flagfiles_that_the_hosts_have(bench):
    bench.make_data()
    flags = "(--flagfile=digits --flagfile=/mnt/own.flags --flagfile=gs://b/own.flags)"
    bench.settings["TRAIN_FLAGS"] = flags
    assert "add --yes" in bench.refused("create")
    bench.settings["TRAIN_FLAGS"] = "(--flagfile=digit)"
    assert "name digit, but there is no such recipe or file" in bench.refused("create")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command given"),
        (["destroy"], "unknown command destroy"),
        (["--force", "delete"], "unknown option --force"),
        (["create", "--yes"], "options go before the command"),
    ],
)
def test_a_wrong_command_line(bench, arguments, message):
    assert message in bench.run(*arguments, status=1)


def test_the_shells_own_variables_are_not_settings(bench, monkeypatch):
    monkeypatch.setenv("NAME", "from-the-shell")
    del bench.settings["NAME"]
    assert "does not set NAME" in bench.run("cost", status=1)


@pytest.mark.parametrize(
    ("accelerator", "provisioning", "chips", "dollars"),
    [
        ("v4-16", "on_demand", 8, 8 * 3.22),
        ("v4-16", "spot", 8, 8 * 0.9215),
        ("v5litepod-1", "on_demand", 1, 1.2),
        ("v3-32", "spot", 16, 16 * 0.6),
    ],
)
def test_cost(bench, accelerator, provisioning, chips, dollars):
    bench.settings.update(ACCELERATOR_TYPE=accelerator, PROVISIONING=provisioning, HOURS="100")
    output = bench.run("cost")
    assert f"${dollars:.2f} an hour for {chips} chip" in output
    assert f"100 hours: about ${100 * round(dollars, 2):.0f}" in output
    assert bench.cloud.calls() == []


def test_the_prices_in_the_readme(bench):
    text = (ROOT / "gcp" / "README.md").read_text()
    rows = re.findall(r"^\| (v\w+-\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for accelerator, chips, *prices in rows:
        for provisioning, price in zip(("on_demand", "spot"), prices):
            bench.settings.update(ACCELERATOR_TYPE=accelerator, PROVISIONING=provisioning)
            assert f"about ${price} an hour for {chips} chips" in bench.run("cost")


def test_help_is_the_head_of_the_file(bench):
    output = bench.run("--help")
    assert output.startswith("Trains on a Cloud TPU") and output.endswith("gcp/README.md.\n")
    assert "shellcheck" not in output


def test_stacks_and_images_belong_together():
    table = [
        line.split("\t")
        for line in (ROOT / "gcp" / "tpus.tsv").read_text().splitlines()
        if not line.startswith("#")
    ]
    pins = (ROOT / "gcp" / "stacks" / "pod.txt").read_text()
    version = pins.split("tensorflow-tpu==")[1].split()[0]
    assert {row[4] for row in table} == {f"tpu-vm-tf-{version}-pod-pjrt", "-"}
    stacks = [file.read_text() for file in (ROOT / "gcp" / "stacks").glob("*.txt")]
    assert {text.split("\nkeras==")[1].split()[0] for text in stacks} == {"3.12.4"}


# Creating and deleting.


def test_create_requests_the_tpu_and_waits(bench):
    bench.make_data()
    output = bench.run("--yes", "create")
    assert output.index("an hour for 8 chips") < output.index("queued-resources create")
    assert "WAITING_FOR_RESOURCES" in output and "is ready" in output
    (call,) = words(bench, "create")
    _, _, flags = fake_gcloud.parse(call)
    assert flags["accelerator-type"] == "v4-16"
    assert flags["runtime-version"] == "tpu-vm-tf-2.17.0-pod-pjrt"
    assert flags["spot"] and flags["valid-until-duration"] == "120m"
    assert not {"internal-ips", "network"} & set(flags)


def test_hosts_without_an_external_address_are_reached_through_the_proxy(bench):
    bench.make_data()
    bench.use_trainer()
    bench.settings.update(
        ADDRESSES="internal", NETWORK="tpus", STRATEGY="multi_worker", RUNS_DIR="/runs"
    )
    bench.run("--yes", "create")
    bench.run("install")
    assert bench.run("--dry_run", "fetch").rstrip().endswith("--tunnel-through-iap")
    (call,) = words(bench, "create")
    _, _, flags = fake_gcloud.parse(call)
    assert flags["internal-ips"] and flags["network"] == "tpus"
    logins = [call for call in bench.cloud.calls() if {"ssh", "scp"} & set(call)]
    assert {"ssh", "scp"} <= {word for call in logins for word in call}
    assert all("--tunnel-through-iap" in call for call in logins)


@pytest.mark.long
def test_create_on_demand_on_one_host(bench):
    bench.make_data()
    bench.settings.update(PROVISIONING="on_demand", ACCELERATOR_TYPE="v5litepod-8")
    bench.run("--yes", "create")
    _, _, flags = fake_gcloud.parse(words(bench, "create")[0])
    assert flags["runtime-version"] == "v2-alpha-tpuv5-lite" and "spot" not in flags


def test_nothing_is_created_without_confirmation(bench):
    bench.make_data()
    assert "add --yes" in bench.refused("create")


@pytest.mark.long
def test_create_again_creates_nothing(created):
    created.run("--yes", "create")
    assert len(words(created, "create")) == 1


@pytest.mark.long
def test_create_resumes_waiting_for_a_request(bench):
    bench.make_data()
    bench.cloud.set_faults({"on": "queued-resources create", "do": "starve"})
    process = bench.start("--yes", "create")
    wait_for(lambda: words(bench, "create"))
    process.terminate()
    process.communicate(timeout=10)
    with bench.cloud.state() as state:
        state["requests"]["my-tpu"]["then"] = ["PROVISIONING", "ACTIVE"]
    assert "is ready" in bench.run("--yes", "create")
    assert len(words(bench, "create")) == 1


def test_a_missing_bucket_is_an_error_before_anything_costs(bench):
    assert "there is no bucket gs://my-bucket: gcp/tpu copy_data" in bench.refused(
        "--yes", "create"
    )


@pytest.mark.long
def test_a_missing_bucket_that_copy_data_does_not_create(bench):
    bench.settings["DATA_DIR"] = "/mnt/digits"
    output = bench.refused("--yes", "create")
    (line,) = [line for line in output.splitlines() if "there is no bucket" in line]
    command = shlex.split(line.partition("gs://my-bucket: ")[2])
    bench.cloud.run(command[1:])
    assert "is ready" in bench.run("--yes", "create")


@pytest.mark.long
def test_a_name_that_belongs_to_somebody_else(created):
    with created.cloud.state() as state:
        state["account"] = "john@example.com"
    for command in ("create", "install", "train", "delete"):
        output = created.refused("--yes", command)
        assert (
            "belongs to jane_doe_example_com, not to john_example_com: choose another NAME"
            in output
        )


@pytest.mark.long
def test_a_tpu_of_that_name_created_otherwise(created):
    with created.cloud.state() as state:
        state["requests"].clear()
    assert "choose another NAME" in created.refused("--yes", "create")


@pytest.mark.long
def test_a_preempted_tpu_is_not_deleted_without_confirmation(created):
    created.cloud.preempt("my-tpu")
    output = created.refused("create")
    assert "is no longer usable (request SUSPENDED, TPU NONE)" in output and "add --yes" in output
    assert "is ready" in created.run("--yes", "create")


def test_a_stopped_tpu_is_not_recreated(created):
    with created.cloud.state() as state:
        state["nodes"]["my-tpu"]["state"] = "STOPPED"
    output = created.refused("--yes", "create")
    assert "start it with gcloud compute tpus tpu-vm start my-tpu" in output


def test_another_type_under_the_same_name(created):
    created.settings["ACCELERATOR_TYPE"] = "v4-8"
    assert "my-tpu exists as v4-16, but ACCELERATOR_TYPE is v4-8" in created.refused(
        "--yes", "create"
    )


def test_other_software_under_the_same_name(created):
    created.settings["STRATEGY"] = "tpu"
    for command in ("create", "install"):
        output = created.refused("--yes", command)
        assert "exists with runtime version tpu-ubuntu2204-base, but STRATEGY=tpu" in output
        assert "need tpu-vm-tf-2.17.0-pod-pjrt" in output


def test_a_zone_without_quota(bench):
    bench.make_data()
    message = "RESOURCE_EXHAUSTED: Quota limit 'TPUV4...' has been exceeded. Limit: 0"
    bench.cloud.set_faults({"on": "queued-resources create", "do": "fail", "message": message})
    output = bench.run("--yes", "create", status=1)
    assert message in output
    assert "no quota for spot v4-16 in us-central2-b" in output


@pytest.mark.long
def test_a_zone_without_capacity(bench):
    bench.make_data()
    message = "There is no more capacity in the zone"
    bench.cloud.set_faults({"on": "queued-resources create", "do": "refuse", "message": message})
    output = bench.run("--yes", "create", status=1)
    assert message in output and "no free v4-16 now" in output
    assert len(words(bench, "delete")) == 1
    assert "is ready" in bench.run("--yes", "create")


def test_a_request_that_is_never_granted_is_withdrawn(bench):
    bench.make_data()
    bench.cloud.set_faults({"on": "queued-resources create", "do": "starve"})
    bench.settings["WAIT_MINUTES"] = "1"
    # Time advances with each poll.
    script = f"SECONDS=0; sleep() {{ SECONDS=$((SECONDS + 30)); }}; . {ROOT}/gcp/tpu"
    finished = subprocess.run(
        ["bash", "-c", script, *bench.arguments("--yes", "create")],
        env=bench.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert finished.returncode == 1
    assert "no v4-16 within 1 minutes; withdrew the request" in finished.stderr
    with bench.cloud.state() as state:
        assert state["requests"] == {}


@pytest.mark.long
def test_hosts_that_refuse_ssh_at_first(bench):
    bench.make_data()
    fault = {"on": "^true$", "worker": 1, "do": "fail", "message": "Permission denied"}
    bench.cloud.set_faults({**fault, "times": 2})
    assert "is ready" in bench.run("--yes", "create")
    bench.cloud.set_faults({**fault, "times": 99})
    output = bench.run("--yes", "create", status=1)
    assert "Permission denied" in output and "cannot connect to the hosts" in output


@pytest.mark.long
def test_a_project_whose_name_contains_an_error_number(bench):
    bench.make_data()
    bench.settings["PROJECT"] = "my-project-403512"
    assert "is ready" in bench.run("--yes", "create")
    bench.settings["PROJECT"] = "my-project-404112"
    message = "UNAVAILABLE: projects/my-project-404112 cannot be reached"
    bench.cloud.set_faults({"on": "queued-resources describe", "do": "fail", "message": message})
    output = bench.refused("--yes", "delete")
    assert message in output and "there is no my-tpu" not in output


@pytest.mark.parametrize(
    "message",
    [
        "PERMISSION_DENIED: Permission 'tpu.queuedResources.get' denied on 'projects/my-project'",
        "[jane] does not have permission to access b instance [my-bucket] (or it may not exist): "
        "Permission 'storage.buckets.get' denied on resource (or it may not exist).",
    ],
)
def test_permission_denied(bench, message):
    bench.make_data()
    bench.cloud.set_faults({"on": " describe ", "do": "fail", "message": message})
    output = bench.refused("--yes", "create")
    assert message in output and "your account lacks a role" in output


@pytest.mark.long
def test_an_agent_without_gclouds_key(bench, tmp_path, monkeypatch):
    bench.make_data()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    key = tmp_path / ".ssh" / "google_compute_engine"
    for file in (key, tmp_path / "other"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", file], check=True)
    program = bench.folder / "bin" / "ssh-add"
    # A fake agent that holds one key.
    for held in (key, tmp_path / "other"):
        program.write_text(f"#!/bin/bash\n[ $1 = -l ] && ssh-keygen -lf {held}\n")
        program.chmod(0o755)
        output = bench.refused("create")
        assert ("add --yes" in output) == (held == key)
    assert (
        f"the ssh-agent lacks the key that gcloud uses to copy to the hosts: run ssh-add {key}"
        in output
    )
    bench.settings["ACCELERATOR_TYPE"] = "v4-8"
    assert "add --yes" in bench.refused("create")


def test_no_account(bench):
    bench.make_data()
    with bench.cloud.state() as state:
        state["account"] = ""
    assert "gcloud auth login" in bench.refused("--yes", "create")


def test_without_gcloud(bench, monkeypatch):
    tools = bench.folder / "tools"
    tools.mkdir()
    for name in ("awk", "basename", "bash", "dirname", "env", "mktemp", "rm", "sed"):
        (tools / name).symlink_to(shutil.which(name))
    (bench.folder / "bin" / "gcloud").unlink()
    monkeypatch.setenv("PATH", str(tools))
    assert "gcloud is not installed" in bench.run("--yes", "create", status=1)


def test_delete_leaves_nothing_running_and_lists_what_stays(ready):
    (ready.cloud.folder / "hold").touch()
    process = ready.start("train")
    wait_for(lambda: ready.trained(1))
    output = ready.run("--yes", "delete")
    process.communicate(timeout=20)
    assert process.returncode == 1
    assert "gcloud storage rm --recursive gs://my-bucket/runs" in output
    with ready.cloud.state() as state:
        assert state["requests"] == {} and state["nodes"] == {}
    assert "there is no my-tpu" in ready.run("--yes", "delete")


def test_delete_waits_for_a_preemption_to_finish(created):
    created.cloud.preempt("my-tpu")
    created.run("--yes", "delete")
    with created.cloud.state() as state:
        assert state["requests"] == {}


# Data.


def shards(folder):
    folder.mkdir()
    (folder / "train-00000-of-00001").write_bytes(b"x" * 3_000_000)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_copy_data_creates_the_bucket_in_the_tpus_region(bench, tmp_path):
    bench.settings["LOCAL_DATA"] = str(shards(tmp_path / "digits"))
    output = bench.run("--yes", "copy_data")
    assert "3 MB" in output or "4 MB" in output
    (call,) = words(bench, "create")
    assert "--location=us-central2" in call
    copied = bench.cloud.folder / "buckets" / "my-bucket" / "digits"
    assert sorted(file.name for file in copied.iterdir()) == [
        "manifest.json",
        "train-00000-of-00001",
    ]
    bench.run("--yes", "copy_data")
    assert len(words(bench, "create")) == 1


def test_a_bucket_that_belongs_to_somebody_else(bench, tmp_path):
    bench.settings["LOCAL_DATA"] = str(shards(tmp_path / "digits"))
    with bench.cloud.state() as state:
        state["foreign_buckets"].append("gs://my-bucket")
    assert "belongs to somebody else" in bench.refused("--yes", "copy_data")


def test_a_bucket_that_cannot_be_created(bench, tmp_path):
    bench.settings["LOCAL_DATA"] = str(shards(tmp_path / "digits"))
    message = "HTTPError 409: The requested bucket name is not available."
    bench.cloud.set_faults({"on": "buckets create", "do": "fail", "message": message})
    output = bench.run("--yes", "copy_data", status=1)
    assert message in output and "choose another in DATA_DIR and RUNS_DIR" in output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "LOCAL_DATA is not set"),
        (
            {"LOCAL_DATA": "/nowhere"},
            "/nowhere has no train-* shards: write them with imagenet-fast prepare",
        ),
        ({"DATA_DIR": "/mnt/digits"}, "a path on the hosts"),
    ],
)
def test_data_that_cannot_be_copied(bench, settings, message):
    bench.settings.update(settings)
    assert message in bench.refused("--yes", "copy_data")


def test_training_without_data(ready):
    (ready.cloud.folder / "buckets/my-bucket/digits/train-00000-of-00001").unlink()
    assert "there are no shards in gs://my-bucket/digits: run gcp/tpu copy_data" in ready.refused(
        "train"
    )


# Installing.


def installed(bench, worker, name="my-tpu"):
    return (bench.cloud.host(name, worker) / "imagenet_fast.installed").exists()


def test_what_is_installed(ready):
    for worker in range(2):
        home = ready.cloud.host("my-tpu", worker)
        for file in ("setup.cfg", "gcp/host/job.sh", "imagenet_fast/__init__.py"):
            assert (home / "imagenet_fast" / file).read_bytes() == (
                ready.checkout / file
            ).read_bytes()
        calls = [
            json.loads(line)
            for line in (home / "imagenet_fast_venv/pip.jsonl").read_text().splitlines()
        ]
        assert ["--no-deps" in call for call in calls] == [True, True, False]
        assert "gcp/stacks/cpu.txt" in calls[0]
        # Packages that require plain tensorflow must not install it.
        required = (home / "imagenet_fast" / "requirements.txt").read_text().split()
        assert "tqdm>=4.65" in required
        assert not [name for name in required if name.startswith(("tensorflow", "keras"))]


@pytest.mark.long
def test_install_again_does_nothing_until_a_file_changes(ready):
    assert "already installed on all 2 hosts" in ready.run("install")
    assert words(ready, "scp")[1:] == []
    (ready.checkout / "imagenet_fast" / "flags" / "digits.flags").open("a").write("# changed\n")
    (ready.checkout / "LICENSE").unlink()
    (ready.checkout / "runs").mkdir()
    (ready.checkout / "runs" / "ignored").touch()
    ready.run("install")
    for worker in range(2):
        copy = ready.cloud.host("my-tpu", worker) / "imagenet_fast"
        assert (
            (copy / "imagenet_fast" / "flags" / "digits.flags").read_text().endswith("# changed\n")
        )
        assert not (copy / "LICENSE").exists() and not (copy / "runs").exists()


@pytest.mark.long
def test_another_stack_gets_a_new_environment(bench):
    bench.make_data()
    bench.settings["ACCELERATOR_TYPE"] = "v4-8"
    bench.run("--yes", "create")
    venv = bench.cloud.host("my-tpu", 0) / "imagenet_fast_venv"
    for strategy, name in (("multi_worker", "tensorflow"), ("tpu", "tensorflow_tpu")):
        bench.settings["STRATEGY"] = strategy
        bench.run("install")
        (found,) = (venv / "site").glob("tensorflow*.dist-info")
        assert found.name.startswith(f"{name}-")


@pytest.mark.long
def test_nothing_is_installed_under_a_running_training(ready):
    (ready.cloud.folder / "hold").touch()
    process = ready.start("train")
    wait_for(lambda: ready.trained(1))
    (ready.checkout / "imagenet_fast" / "flags" / "digits.flags").open("a").write("# changed\n")
    assert "digits is training on the hosts: run gcp/tpu stop first" in ready.run(
        "install", status=1
    )
    (ready.cloud.folder / "hold").unlink()
    process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.long
def test_install_fails_on_one_host(created):
    created.cloud.set_faults(
        {"on": "install.sh", "worker": 1, "do": "fail", "message": "Connection closed"}
    )
    output = created.run("install", status=1)
    assert "installation failed on host 1: rerun gcp/tpu install" in output
    assert installed(created, 0) and not installed(created, 1)
    created.run("install")
    assert installed(created, 1)


@pytest.mark.long
def test_a_failed_installation_is_not_marked_as_installed(created):
    python = created.cloud.host("my-tpu", 0) / "bin" / "python3"
    text = python.read_text()
    python.write_text('#!/bin/bash\n[ "$1 $2" != "-m venv" ]\n')
    assert "installation failed on host 0:" in created.run("install", status=1)
    assert not installed(created, 0)
    python.write_text(text)
    created.run("install")
    assert installed(created, 0)


@pytest.mark.long
def test_install_adds_venv_where_python_lacks_it(created):
    home = created.cloud.host("my-tpu", 1)
    python = home / "bin" / "python3"
    text = python.read_text()
    check = '[ "$2" != "import ensurepip" ] || [ -e "$HOME/sudo" ] || exit 1'
    python.write_text(text.replace("#!/bin/bash\n", f"#!/bin/bash\n{check}\n"))
    created.run("install")
    assert "install python3-venv" in (home / "sudo").read_text()
    assert not (created.cloud.host("my-tpu", 0) / "sudo").exists()


def test_install_and_train_need_a_tpu(bench):
    bench.make_data()
    for command in ("install", "train", "stop"):
        assert "is not ready (request NONE, TPU NONE): run gcp/tpu create" in bench.refused(command)


@pytest.mark.long
def test_train_needs_an_installation(created, prepared):
    assert "No such file" in created.run("train", status=1)
    shutil.copytree(prepared[1], created.cloud.folder, dirs_exist_ok=True)
    (created.cloud.host("my-tpu", 0) / "imagenet_fast.installed").unlink()
    assert "imagenet_fast is not installed on t1v-my-tpu-w-0: run gcp/tpu install" in created.run(
        "train", status=1
    )


# Training, with the fake trainer.


def test_each_host_is_a_worker(ready):
    ready.settings["TRAIN_FLAGS"] = '(--seed=3 "--duration=2 epochs")'
    ready.settings["RUN"] = "third"
    output = ready.run("train")
    assert "training on t1v-my-tpu-w-0" in output
    assert "trained: gs://my-bucket/runs/third" in output
    for worker in range(2):
        lines = ready.trained(worker)
        assert lines[: lines.index("--duration=2 epochs") + 1] == [
            "train",
            "--flagfile=digits",
            "--data_dir=gs://my-bucket/digits",
            "--model_dir=gs://my-bucket/runs/third",
            "--strategy=multi_worker",
            "--seed=3",
            "--duration=2 epochs",
        ]
        config = next(line for line in lines if line.startswith("TF_CONFIG="))
        assert json.loads(config[10:]) == {
            "cluster": {"worker": ["127.0.0.1:8888", "127.0.0.1:8889"]},
            "task": {"type": "worker", "index": worker},
        }
        assert f"PWD={ready.cloud.host('my-tpu', worker)}/imagenet_fast" in lines


@pytest.mark.long
def test_one_host_drives_a_whole_slice(bench):
    bench.use_trainer()
    bench.make_data()
    for command in ("create", "install", "train"):
        bench.run("--yes", command)
    lines = bench.trained(0)
    assert "--strategy=tpu" in lines
    assert "TPU_NAME=my-tpu" in lines and "TPU_LOAD_LIBRARY=0" in lines
    assert not [line for line in lines if line.startswith("TF_CONFIG=")]
    assert bench.trained(1) is None
    site = bench.cloud.host("my-tpu", 1) / "imagenet_fast_venv" / "site"
    assert (site / "tensorflow_tpu-2.17.0.dist-info").is_dir()
    assert (site / "openssl_before_tensorflow.pth").exists()


@pytest.mark.long
def test_a_single_host_drives_its_own_chips(bench):
    bench.use_trainer()
    bench.make_data()
    bench.settings["ACCELERATOR_TYPE"] = "v4-8"
    for command in ("create", "install", "train"):
        bench.run("--yes", command)
    lines = bench.trained(0)
    venv = bench.cloud.host("my-tpu", 0) / "imagenet_fast_venv"
    assert (
        "TPU_NAME=local" in lines and f"TF_PLUGGABLE_DEVICE_LIBRARY_PATH={venv}/libtpu.so" in lines
    )
    assert not [line for line in lines if line.startswith("TPU_LOAD_LIBRARY=")]
    assert (venv / "site" / "tensorflow_tpu-2.20.0.dist-info").is_dir()
    assert (venv / "site" / "libtpu-0.0.14.dist-info").is_dir()


def test_training_outlives_the_connection_and_is_not_started_twice(ready, tmp_path):
    hold = ready.cloud.folder / "hold"
    hold.touch()
    # A file, because the processes on the host keep it open.
    with (tmp_path / "output").open("w") as output:
        process = ready.start("train", output=output)
    wait_for(lambda: "training on" in (tmp_path / "output").read_text())
    # Like a terminal's: gcloud gets the signal, too.
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=20)
    again = ready.start("train")
    lines = [again.stdout.readline() for _ in range(4)]
    assert lines[1::2] == [f"already running on t1v-my-tpu-w-{worker}\n" for worker in range(2)]
    hold.unlink()
    output, _ = again.communicate(timeout=20)
    assert again.returncode == 0, output
    assert output.count("training on t1v-my-tpu-w-0") == 1


@pytest.mark.long
def test_a_lost_connection_is_reopened(ready):
    (ready.cloud.folder / "hold").touch()
    faults = [
        {"on": f"job.sh {command}", "worker": 0, "do": "fail", "message": "Broken pipe"}
        for command in ("follow", "status", "status", "status")
    ]
    ready.cloud.set_faults(*faults)
    process = ready.start("train")
    wait_for(lambda: (ready.cloud.folder / "faults.json").read_text() == "[]")
    wait_for(lambda: sum("follow" in call[6] for call in words(ready, "ssh")) == 2)
    (ready.cloud.folder / "hold").unlink()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "training continues" in output and "trained: " in output


@pytest.mark.long
def test_training_that_ends_while_the_connection_is_lost(ready):
    fault = {"on": "job.sh follow", "worker": 0, "do": "fail", "message": "Broken pipe"}
    ready.cloud.set_faults({**fault, "times": 999})
    assert "trained: " in ready.run("train")


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "keep_running"])
def test_an_interruption_leaves_training_running(ready, command, tmp_path):
    (ready.cloud.folder / "hold").touch()
    # A file, because the processes on the host keep it open.
    with (tmp_path / "output").open("w") as output:
        process = ready.start("--yes", command, output=output)
    wait_for(lambda: "training on" in (tmp_path / "output").read_text())
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert "connection lost" not in (tmp_path / "output").read_text()
    assert "stopped on t1v-my-tpu-w-0" in ready.run("stop")


@pytest.mark.long
def test_keep_running_resumes_after_a_reboot_of_the_host(ready):
    hold = ready.cloud.folder / "hold"
    hold.touch()
    process = ready.start("--yes", "keep_running")
    wait_for(lambda: ready.trained(1))
    ready.cloud.kill_all()
    hold.unlink()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "host 0 was restarted" in output and "trained: " in output
    assert len(words(ready, "create")) == 1


def test_stop(ready):
    (ready.cloud.folder / "hold").touch()
    process = ready.start("train")
    wait_for(lambda: ready.trained(1))
    output = ready.run("stop")
    assert "stopped on t1v-my-tpu-w-0" in output and "stopped on t1v-my-tpu-w-1" in output
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "training failed" in output
    assert "not running" in ready.run("stop")


@pytest.mark.long
def test_training_that_fails_says_so(ready):
    (ready.cloud.folder / "status").write_text("2")
    output = ready.run("train", status=1)
    assert "training failed" in output
    # The log of any host can be read again.
    assert "training on t1v-my-tpu-w-1" in ready.run("logs", "1", status=2)


# An orphan becomes a zombie of this process, as in a container whose first process reaps nothing.
WITHOUT_REAPER = """
import ctypes, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
job = ["bash", "imagenet_fast/gcp/host/job.sh"]
subprocess.run([*job, "start", "digits", "worker", "{}", "--", "train"], check=True)
sys.exit(subprocess.run([*job, "follow", "digits"], timeout=20).returncode)
"""


def test_following_the_log_ends_although_the_job_is_a_zombie(ready):
    home = ready.cloud.host("my-tpu", 0)
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_REAPER],
        cwd=home,
        env=fake_gcloud.environment(home),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "training on t1v-my-tpu-w-0" in finished.stdout


def test_fetch_from_the_bucket(ready):
    folder = ready.cloud.folder / "buckets/my-bucket/runs/mine"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    ready.settings["RUN"] = "mine"
    assert "runs/mine/report.html" in ready.run("fetch")
    target = ready.checkout / "runs" / "mine"
    assert (target / "summary.json").read_text() == "{}"


@pytest.mark.long
def test_keep_running_does_not_repeat_failed_training(ready):
    (ready.cloud.folder / "status").write_text("1")
    output = ready.run("--yes", "keep_running", status=1)
    assert "my-tpu was not preempted" in output
    assert len(words(ready, "create")) == 1


@pytest.mark.long
def test_keep_running_restarts_after_a_preemption_during_install(bench):
    bench.use_trainer()
    bench.make_data()
    bench.cloud.set_faults({"on": "tpu-vm scp", "do": "preempt", "name": "my-tpu"})
    output = bench.run("--yes", "keep_running")
    assert "was preempted: recreating it" in output
    assert len(words(bench, "queued-resources")) == 3  # create, delete, create
    assert bench.trained(0)


@pytest.mark.long
def test_keep_running_restarts_after_a_preemption_before_ready(bench):
    bench.use_trainer()
    bench.make_data()
    bench.cloud.set_faults({"on": "queued-resources create", "do": "starve"})
    process = bench.start("--yes", "keep_running")

    def is_requested():
        with bench.cloud.state() as state:
            return state["requests"]

    wait_for(is_requested)
    bench.cloud.preempt("my-tpu")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "my-tpu was preempted (request SUSPENDED, TPU NONE)" in output
    assert len(words(bench, "queued-resources")) == 3 and bench.trained(0)


@pytest.mark.long
def test_keep_running_restarts_after_a_preemption_before_ssh_works(bench):
    bench.use_trainer()
    bench.make_data()
    bench.cloud.set_faults({"on": "--command=true", "do": "preempt", "name": "my-tpu"})
    assert "trained: " in bench.run("--yes", "keep_running")
    assert len(words(bench, "queued-resources")) == 3


def test_keep_running_ends_if_no_tpu_is_granted(bench):
    bench.make_data()
    fault = {"on": "queued-resources create", "do": "refuse", "message": "There is no capacity"}
    bench.cloud.set_faults(fault)
    assert "no free v4-16 now" in bench.run("--yes", "keep_running", status=1)
    assert len(words(bench, "queued-resources")) == 2  # create, delete


# --dry_run.


@pytest.mark.parametrize("accelerator", ["v4-8", "v4-32"])
@pytest.mark.parametrize(
    "command",
    [
        *("copy_data", "create", "install", "train", "keep_running"),
        *("logs", "stop", "fetch", "delete"),
    ],
)
def test_dry_run_prints_valid_commands_and_runs_nothing(bench, tmp_path, command, accelerator):
    bench.settings["ACCELERATOR_TYPE"] = accelerator
    bench.settings["LOCAL_DATA"] = str(shards(tmp_path / "digits"))
    output = bench.run("--dry_run", command)
    assert bench.cloud.calls() == []
    shown = [shlex.split(line[2:]) for line in output.splitlines() if line.startswith("$ ")]
    for words in shown:
        if words[0] == "gcloud":
            fake_gcloud.parse(words[1:])
        else:
            assert words[0] == "tar"
    verbs = {word for words in shown for word in words}
    expected = {"copy_data": "rsync", "fetch": "rsync", "logs": "ssh", "stop": "ssh"}
    expected |= {"install": "scp", "train": "ssh", "keep_running": "ssh"}
    assert expected.get(command, command) in verbs


@pytest.mark.parametrize(
    ("accelerator", "strategy", "processes"),
    [("v4-8", "tpu", 1), ("v4-32", "tpu", 1), ("v4-32", "multi_worker", 2)],
)
def test_how_many_processes_train(bench, accelerator, strategy, processes):
    """One process drives a whole slice, from host 0; tests/training/test_recipes.py says why."""
    bench.settings.update(ACCELERATOR_TYPE=accelerator, STRATEGY=strategy)
    output = bench.run("--dry_run", "train")
    starts = [line for line in output.splitlines() if "job.sh start" in line]
    assert len(starts) == processes
    hosts = [next(word for word in line.split() if "--worker=" in word) for line in starts]
    assert hosts == [f"--worker={host}" for host in range(processes)]
