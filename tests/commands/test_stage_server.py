"""The command ``stage-server``."""

import signal
import socket
import subprocess

import pytest
from server_processes import HOST, other_address, running, running_stage_server

from imagenet_fast import commands
from imagenet_fast.base.addresses import free_port


# In the default run, test_input_server.py ends one.
@pytest.mark.long
def test_ends_in_order_when_asked_to():
    with running_stage_server() as (process, address):
        host, port = address.split(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stdout.read() == ""


def test_a_port_that_is_taken(capsys):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert commands.run(["stage-server", f"--port={port}"]) == 2
    assert f"error: port {port} cannot be used (Address already in use)" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--port=0", "--port=65536"])
def test_ports_that_do_not_exist(capsys, flag):
    assert commands.run(["stage-server", flag]) == 2
    assert f"error: port is {flag.partition('=')[2]}, but must be in [" in capsys.readouterr().err


def test_others_reach_it_at_the_address_that_is_named():
    other, port = other_address(), free_port()
    flags = [f"--port={port}", f"--host={other}"]
    with running(
        "stage-server", *flags, address=f"{other}:{port}", stderr=subprocess.PIPE
    ) as process:
        for address in (HOST, other):
            socket.create_connection((address, port), timeout=5).close()
        process.kill()
        told = process.stderr.read()
    assert f"every machine that the network lets through to {other}, can connect\n" in told


def test_only_this_machine_reaches_it_otherwise():
    with running_stage_server() as (_, address):
        port = int(address.rpartition(":")[2])
        socket.create_connection((HOST, port), timeout=5).close()
        with pytest.raises(TimeoutError):
            socket.create_connection((other_address(), port), timeout=0.5)
