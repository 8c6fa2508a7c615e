"""Servers of the command line, in processes of their own."""

import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from imagenet_fast.base.addresses import free_port

ROOT = pathlib.Path(__file__).parent.parent
HOST = "127.0.0.1"


@contextlib.contextmanager
def running(command, *flags, address="", stderr=None):
    """Starts a server; gives its process when it says that it listens, and ends it at last."""
    process = subprocess.Popen(
        [sys.executable, "-m", "imagenet_fast", command, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        # It must not outlive the tests.
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
    )
    with process:
        try:
            told = process.stdout.readline()
            assert told == f"{command.replace('-', ' ')}: listening at {address}\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def running_server():
    """Starts an input server; gives its process and its address."""
    port = free_port()
    address = f"{HOST}:{port}"
    with running("input-server", f"--host={HOST}", f"--port={port}", address=address) as process:
        yield process, address


@contextlib.contextmanager
def running_stage_server():
    """Starts a stage server; gives its process and its address."""
    port = free_port()
    address = f"{HOST}:{port}"
    with running("stage-server", f"--port={port}", address=address) as process:
        yield process, address


def other_address():
    """Returns an address of this machine that other machines use; skips the test without one.

    Packets that a process here sends there have the destination that others' packets have.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(("192.0.2.1", 9))  # Sends nothing.
        except OSError:
            pytest.skip("this machine has no network")
        return trial.getsockname()[0]
