"""An input server in a process of its own."""

import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
HOST = "127.0.0.1"


def free_port():
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def running_server():
    """Starts a server; gives its process and its address when it listens, and ends it at last."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "imagenet_fast", "input-server", f"--host={HOST}", f"--port={port}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        # It must not outlive the tests.
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
    )
    with process:
        try:
            assert process.stdout.readline() == f"input server: listening at {HOST}:{port}\n"
            yield process, f"{HOST}:{port}"
        finally:
            process.kill()
