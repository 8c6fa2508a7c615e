"""The command ``stage-server``."""

import signal
import socket

import pytest
from server_processes import HOST, running_stage_server

from imagenet_fast import commands


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
