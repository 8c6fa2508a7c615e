"""Checks that crash, hang or raise: told as lines, and the others are made."""

import dataclasses
import json
import os
import sys

import pytest
from patched_devices import FakeGpus

from imagenet_fast import Config
from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import gpus
from imagenet_fast.doctor import run, worker
from imagenet_fast.doctor.finding import ok, wrong

# A worker whose checks say their names, but for those that are told how to end.
STAND_IN = """
import json, os, resource, signal, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{start}
json.loads(input())
print(json.dumps({{"workers": {workers}, "findings": {wrong}}}), flush=True)
for line in sys.stdin:
    name = line.strip()
    ends = {ends}
    if name in ends:
        exec(ends[name])
    print(json.dumps([{{"name": name, "state": "ok", "found": ""}}]), flush=True)
"""
ABORTS = "print('Check failed: status == CUDNN_STATUS_SUCCESS', file=sys.stderr); os.abort()"


@pytest.fixture
def no_cluster(monkeypatch):
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "_CHOICES", [])


@pytest.fixture
def findings(monkeypatch):
    """Runs all checks in a stand-in: findings(ends, workers=1, start="", seconds=30, wrong=())."""

    def findings(ends, workers=1, start="", seconds=30.0, wrong=()):
        text = STAND_IN.format(ends=ends, workers=workers, start=start, wrong=list(wrong))
        monkeypatch.setattr(run, "_COMMAND", [sys.executable, "-ISc", text])
        return list(run.examine(Config(), seconds))

    return findings


def test_all_checks_run_in_order(findings):
    assert [own.name for own in findings({})] == list(worker.CHECKS)
    assert [own.name for own in findings({}, workers=2)] == [*worker.CHECKS, "cluster"]


def test_a_check_that_aborts_the_process(findings):
    found = findings({"convolutions": ABORTS})
    assert [own.name for own in found] == list(worker.CHECKS)
    (crashed,) = [own for own in found if own.state != "ok"]
    assert (crashed.name, crashed.state) == ("convolutions", "wrong")
    assert "ended by SIGABRT: Check failed: status == CUDNN_STATUS_SUCCESS" in crashed.found


def test_a_check_that_hangs(findings):
    found = findings({"all-reduce": "time.sleep(60)"}, seconds=1.0)
    assert [own.name for own in found] == list(worker.CHECKS)
    (hanging,) = [own for own in found if own.state != "ok"]
    assert hanging.name == "all-reduce"
    assert hanging.found == "the check did not answer in 1 s"


def test_processes_that_cannot_start_again(findings, tmp_path):
    """As where a check has lost the GPU: that ends, and what could not be checked is told."""
    lost = tmp_path / "lost"
    start = f"import pathlib; pathlib.Path({str(lost)!r}).exists() and os.kill(os.getpid(), 9)"
    dies = f"open({str(lost)!r}, 'w').close(); os.kill(os.getpid(), 9)"
    found = findings({"convolutions": dies}, workers=2, start=start)
    names = list(worker.CHECKS)
    place = names.index("convolutions")
    assert [own.name for own in found] == [*names[: place + 1], "TensorFlow"]
    assert [own.state for own in found[place:]] == ["wrong", "wrong"]
    assert "does not start again after convolutions: " in found[-1].found
    assert found[-1].advice == f"not checked: {', '.join(names[place + 1 :])}"


def test_wrong_options_are_reported_once_and_checks_run(findings):
    """Though another process is started after one has died."""
    told = dataclasses.asdict(wrong("gpus", "gpus=3, but TensorFlow sees no GPUs"))
    found = findings({"all-reduce": ABORTS}, wrong=[told])
    assert [own.name for own in found] == ["gpus", *worker.CHECKS]


def test_options_that_choose_no_devices(no_cluster, monkeypatch):
    """The other checks are made without them."""
    monkeypatch.setenv("TF_CONFIG", "{")
    FakeGpus(monkeypatch, 1)
    workers, config, found = worker.choose_devices(Config(gpus="3"))
    assert (workers, config.gpus, "TF_CONFIG" in os.environ) == (1, "", False)
    assert [(own.name, own.state) for own in found] == [("cluster", "wrong"), ("gpus", "wrong")]
    assert found[0].found.startswith("TF_CONFIG is not JSON")
    assert found[1].found == "gpus=3, but TensorFlow sees 1 GPU"
    _, _, (found,) = worker.choose_devices(Config(strategy="multi_worker"))
    assert (found.name, found.state) == ("cluster", "wrong")
    assert found.found.startswith("strategy=multi_worker needs the workers' addresses")
    task = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    assert worker.choose_devices(Config(gpus="1")) == (2, Config(gpus="1"), [])


def test_a_package_that_is_missing(monkeypatch):
    hide = (
        "import sys; sys.modules['tensorflow'] = None; "
        "from imagenet_fast.doctor.worker import main; main()"
    )
    monkeypatch.setattr(run, "_COMMAND", [sys.executable, "-c", hide])
    (found,) = run.examine(Config(), 60)
    assert (found.name, found.state) == ("TensorFlow", "wrong")
    assert "tensorflow" in found.found and "pip install -e ." in found.advice


def test_tensorflow_import_error_is_reported_once(findings):
    (found,) = findings({}, start="raise ImportError('libcublas.so.12: no version information')")
    assert (found.name, found.state) == ("TensorFlow", "wrong")
    assert "ImportError: libcublas.so.12: no version information" in found.found


def test_a_cluster_that_breaks(findings):
    *_, last = findings({"cluster": ABORTS}, workers=2)
    assert (last.name, last.state) == ("cluster", "wrong")
    assert "SIGABRT" in last.found


def _raise(error):
    def check(_):
        raise error

    return check


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("no such TPU"), "no such TPU"),
        (RuntimeError("first line\nsecond line"), "RuntimeError: first line"),
        (KeyError(), "KeyError: KeyError"),
    ],
)
def test_a_check_that_raises(monkeypatch, error, told):
    monkeypatch.setattr("imagenet_fast.doctor.native.check_resize", _raise(error))
    (found,) = worker.run_check("resize", Config())
    assert (found.name, found.state, found.found) == ("resize", "wrong", told)


def test_a_resize_that_cannot_be_compiled_is_slow(monkeypatch):
    from imagenet_fast.data.jpeg import image_ops

    monkeypatch.setattr(image_ops, "load_ops", lambda *files: _raise(OSError("no compiler"))(0))
    (found,) = worker.run_check("resize", Config())
    assert (found.state, found.found.rpartition(": ")[2]) == ("slow", "no compiler")
    assert "g++" in found.advice


def test_every_check_exists(monkeypatch):
    for name, place in worker._ALL.items():
        module, _, function = place.partition(":")
        monkeypatch.setattr(f"{module}.{function}", lambda config, name=name: [ok(name, "")])
        assert worker.run_check(name, Config()) == [ok(name, "")]
