"""What another machine, here another network namespace, can do at the servers."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest
from server_processes import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from network_lab import namespaces, requirements
from network_lab.errors import LabError

JOB = pathlib.Path(__file__).with_name("stranger_job.py")
HERE, THERE = "10.83.0.1", "10.83.0.2"


@pytest.fixture(scope="module")
def machines():
    """Two namespaces that a cable connects: a server's, and a stranger's."""
    try:
        requirements.check()
    except LabError as error:
        pytest.skip(str(error))
    names = [f"{namespaces.own_prefix()}{name}" for name in ("server", "stranger")]
    try:
        for name in names:
            namespaces.add(name)
        cable = "ip -n {} link add cable type veth peer name cable netns {}"
        namespaces.run(*cable.format(*names).split())
        for name, address in zip(names, (HERE, THERE)):
            namespaces.run(*f"ip -n {name} address add {address}/24 dev cable".split())
            namespaces.run(*f"ip -n {name} link set cable up".split())
        yield names
    finally:
        namespaces.remove_all(namespaces.own_prefix())


@contextlib.contextmanager
def serving(machine, command, *flags):
    process = subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, "-m", "imagenet_fast", command, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert "listening at" in process.stdout.readline()
            yield
        finally:
            process.kill()


def succeeding(machine, command, address, path):
    """Returns what a stranger succeeds in."""
    finished = subprocess.run(
        ["ip", "netns", "exec", machine, sys.executable, JOB, command, f"{address}:5050", path],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout)


@pytest.mark.network_lab
@pytest.mark.long
@pytest.mark.parametrize("host", ["", HERE])
@pytest.mark.parametrize("command", ["input-server", "stage-server"])
def test_a_stranger_can_do_something_only_where_it_is_let_in(machines, tmp_path, command, host):
    server, stranger = machines
    flags = ["--port=5050", *([f"--host={host}"] if host else [])]
    everything = ["connect", "list", "read", "write"]
    with serving(server, command, *flags):
        # On the server's machine, of which HERE is an address.
        assert succeeding(server, command, "127.0.0.1", tmp_path / "own") == everything
        assert (tmp_path / "own").read_text() == "written"
        can = succeeding(stranger, command, HERE, tmp_path / "planted")
        assert can == (everything if host else [])
        assert (tmp_path / "planted").exists() == bool(host)
