"""The fake gcloud refuses what gcloud refuses; otherwise the other tests would prove nothing."""

import shlex

import fake_gcloud
import pytest

CREATE = (
    "compute tpus queued-resources create q --node-id=n --accelerator-type=v4-16 "
    "--runtime-version=r --project=p --zone=us-central2-b"
)


@pytest.fixture
def cloud(tmp_path):
    return fake_gcloud.Cloud(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compute tpus tpu-vm destroy x", "Invalid choice"),
        ("compute instances list", "Invalid choice"),
        (f"{CREATE} --preemptible", "unrecognized arguments: --preemptible"),
        (f"{CREATE} --spot=yes", "unrecognized arguments: --spot=yes"),
        (f"{CREATE} again", "takes 1 argument"),
        (CREATE.replace("--runtime-version=r", ""), "--runtime-version: Must be specified"),
        (CREATE.replace("--zone=us-central2-b", ""), "--zone: Must be specified"),
        ("storage rsync here gs://b/there --delete", "unrecognized arguments: --delete"),
        ("storage ls gs://b/ --project", "--project: expected one argument"),
    ],
)
def test_wrong_command_lines(cloud, line, message):
    with pytest.raises(fake_gcloud.GcloudError, match=message):
        cloud.run(shlex.split(line))
    assert cloud.calls() == []


def run(cloud, line):
    return cloud.run(shlex.split(line))


def states(cloud, capsys, count):
    found = []
    for _ in range(count):
        place = "--project=p --zone=us-central2-b"
        run(
            cloud, f"compute tpus queued-resources describe q {place} '--format=value(state.state)'"
        )
        found.append(capsys.readouterr().out.strip())
    return found


def test_a_request_is_granted_after_a_while_and_can_be_preempted(cloud, capsys):
    run(cloud, f"{CREATE} --labels=imagenet_fast=me")
    assert states(cloud, capsys, 4) == ["WAITING_FOR_RESOURCES", "PROVISIONING", *["ACTIVE"] * 2]
    assert cloud.host("n", 1).is_dir() and not cloud.host("n", 2).exists()
    place = "--project=p --zone=us-central2-b"
    fields = "state,networkEndpoints[].ipAddress,labels.imagenet_fast"
    run(cloud, f"compute tpus tpu-vm describe n {place} '--format=value({fields})'")
    assert capsys.readouterr().out == "READY\t127.0.0.1;127.0.0.1\tme\n"
    with pytest.raises(fake_gcloud.GcloudError, match="ALREADY_EXISTS"):
        run(cloud, CREATE)
    with pytest.raises(fake_gcloud.GcloudError, match="use --force"):
        run(cloud, f"compute tpus queued-resources delete q {place}")
    cloud.preempt("q")
    assert not cloud.host("n", 0).exists()
    with pytest.raises(fake_gcloud.GcloudError, match="NOT_FOUND"):
        run(cloud, f"compute tpus tpu-vm describe n {place} '--format=value(state)'")
    assert states(cloud, capsys, 3) == ["SUSPENDING", "SUSPENDED", "SUSPENDED"]


def test_buckets_are_folders(cloud, tmp_path):
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "train-0").touch()
    with pytest.raises(fake_gcloud.GcloudError, match="not found: 404"):
        run(cloud, f"storage rsync {tmp_path}/data gs://b/data --recursive")
    run(cloud, "storage buckets create gs://b --location=us-central2")
    run(cloud, f"storage rsync {tmp_path}/data gs://b/data --recursive")
    run(cloud, "storage ls gs://b/data/a/train-*")
    with pytest.raises(fake_gcloud.GcloudError, match="matched no objects"):
        run(cloud, "storage ls gs://b/data/train-*")
