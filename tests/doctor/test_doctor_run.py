"""Checks that crash, hang or raise: told as lines, and the others are made."""

import sys

import pytest

from imagenet_fast import Config
from imagenet_fast.doctor import run, worker
from imagenet_fast.doctor.finding import ok
from imagenet_fast.errors import UserError

# A worker whose checks say their names, but for those that are told how to end.
STAND_IN = """
import json, os, resource, signal, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{start}
json.loads(input())
print({workers}, flush=True)
for line in sys.stdin:
    name = line.strip()
    ends = {ends}
    if name in ends:
        exec(ends[name])
    print(json.dumps([{{"name": name, "state": "ok", "found": ""}}]), flush=True)
"""
ABORTS = "print('Check failed: status == CUDNN_STATUS_SUCCESS', file=sys.stderr); os.abort()"


@pytest.fixture
def findings(monkeypatch):
    """Runs all checks in a stand-in: findings(ends, workers=1, start="", seconds=30)."""

    def findings(ends, workers=1, start="", seconds=30.0):
        text = STAND_IN.format(ends=ends, workers=workers, start=start)
        monkeypatch.setattr(run, "_MODULE", [sys.executable, "-ISc", text])
        return list(run.examine(Config(), seconds))

    return findings


def test_all_checks_are_made_in_their_order(findings):
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


def test_tensorflow_that_cannot_be_imported_is_told_once(findings):
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
    from imagenet_fast.data import resize_op

    monkeypatch.setattr(resize_op, "load_ops", lambda source: _raise(OSError("no compiler"))(0))
    (found,) = worker.run_check("resize", Config())
    assert (found.state, found.found.rpartition(": ")[2]) == ("slow", "no compiler")
    assert "g++" in found.advice


def test_every_check_exists(monkeypatch):
    for name, place in worker._ALL.items():
        module, _, function = place.partition(":")
        monkeypatch.setattr(f"{module}.{function}", lambda config, name=name: [ok(name, "")])
        assert worker.run_check(name, Config()) == [ok(name, "")]
