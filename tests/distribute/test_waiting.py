"""The messages of a worker that waits for others."""

import json
import os
import signal
import socket
import subprocess
import sys
import types

import pytest

from imagenet_fast.base.addresses import free_port
from imagenet_fast.distribute import waiting
from imagenet_fast.distribute.waiting import waiting_message

# Logs after 3 seconds.
WAIT = """
import subprocess, types
from imagenet_fast import Config, make_strategy
from imagenet_fast.distribute import waiting

def start(command, **options):
    program = command[2].replace("own.main()", "own._FIRST = 3; own.main()")
    return subprocess.Popen([*command[:2], program, *command[3:]], **options)

waiting.subprocess = types.SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
make_strategy(Config())
"""


def test_message():
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"1=127.0.0.1:{server.getsockname()[1]}"
        missing = f"12=127.0.0.1:{port}"
        reason = f"worker 12 (127.0.0.1:{port}: Connection refused)"
        assert waiting_message([there, missing]) == f"waiting for {reason}"
        assert waiting_message([there]) == "waiting for other workers, whose ports are all open"


def test_messages_come_after_pauses_and_end_with_the_waiting_process(monkeypatch, capsys):
    now = [0]
    clock = types.SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda pause: now.__setitem__(0, now[0] + pause)
    )
    ends = waiting._FIRST + waiting._EVERY + 1
    own = types.SimpleNamespace(getppid=lambda: 7 if now[0] < ends else 1)
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "os", own)
    monkeypatch.setattr(waiting.signal, "signal", lambda *_: None)
    # A third one would raise StopIteration.
    texts = iter(["first", "second"])
    monkeypatch.setattr(waiting, "waiting_message", lambda workers: f"{now[0]}: {next(texts)}")
    monkeypatch.setattr(sys, "argv", ["waiting", "7", "1=a:1"])
    waiting.main()
    messages = [f"{waiting._FIRST}: first", f"{waiting._FIRST + waiting._EVERY}: second"]
    assert capsys.readouterr().err.splitlines() == messages


@pytest.mark.slow
def test_a_waiting_worker_logs_missing_workers_and_ctrl_c_ends_it():
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT],
        env={**os.environ, "TF_CONFIG": json.dumps(task)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with process:
        try:
            lines = iter(process.stderr.readline, "")
            line = next(line for line in lines if line.startswith("waiting for"))
            assert line == f"waiting for worker 1 ({workers[1]}: Connection refused)\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == -signal.SIGINT
        finally:
            process.kill()
