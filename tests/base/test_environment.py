import datetime
import sys
import time

import pytest

from imagenet_fast.base import environment
from imagenet_fast.base.cores import cpu_cores


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("/somewhere/imagenet_fast/__main__.py", "imagenet-fast"),
        ("/usr/bin/imagenet-fast", "imagenet-fast"),
        ("bench.py", "bench.py"),
    ],
)
def test_command_can_be_pasted_into_a_shell(monkeypatch, program, shown):
    monkeypatch.setattr(sys, "argv", [program, "train", "--duration=90 epochs"])
    assert environment.command() == f"{shown} train '--duration=90 epochs'"


def test_hardware():
    hardware = environment.hardware()
    assert hardware["cpu"]
    assert hardware["cores"] == cpu_cores()
    assert isinstance(hardware["gpus"], list)


def test_hardware_without_cpuinfo(monkeypatch):
    def refuse(self):
        raise FileNotFoundError

    monkeypatch.setattr(environment.pathlib.Path, "read_text", refuse)
    hardware = environment.hardware()
    assert hardware["cpu"]
    assert hardware["cpu_features"] == []


def test_versions():
    versions = environment.versions()
    assert versions["python"] == sys.version.split()[0]
    assert all(versions.values())


def test_provenance():
    found = environment.provenance()
    assert list(found) == ["command", "hardware", "versions", "finished"]
    assert found["versions"] == environment.versions()
    assert abs(datetime.datetime.fromisoformat(found["finished"]).timestamp() - time.time()) < 60
