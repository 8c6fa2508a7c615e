"""The command ``input-server``, and training with it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from server_processes import HOST, ROOT, running_server

from imagenet_fast import commands
from imagenet_fast.base.addresses import free_port


# In the default run, tests/data/test_service.py starts servers.
@pytest.mark.long
def test_ends_in_order_when_asked_to():
    with running_server() as (process, address):
        host, port = address.split(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert process.stdout.read() == ""


@pytest.mark.parametrize("flag", ["port", "worker_port"])
def test_a_port_that_is_taken(capsys, flag):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"port": free_port(), flag: port}
        flags = [f"--{name}={number}" for name, number in ports.items()]
        assert commands.run(["input-server", *flags]) == 2
    assert (
        f"error: {flag} {port} cannot be used (Address already in use)" in capsys.readouterr().err
    )


@pytest.mark.parametrize("flag", ["--port=0", "--port=65536", "--worker_port=-1"])
def test_ports_that_do_not_exist(capsys, flag):
    assert commands.run(["input-server", flag]) == 2
    name, number = flag.lstrip("-").split("=")
    assert f"error: {name} is {number}, but must be in [" in capsys.readouterr().err


TRAIN = (
    *("train", "--model=resnet8", "--image_size=16", "--batch_size=64", "--warmup=0 steps"),
    *("--strategy=one_device", "--log_every=1 step", "--notensorboard", "--noexamine"),
)


def losses(model_dir):
    rows = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.long
def test_training_under_the_launcher_is_the_same_with_servers(digits, tmp_path, run_python):
    train = [*TRAIN, f"--data_dir={digits}", "--duration=12 steps"]
    run_python(["-m", "imagenet_fast", *train, f"--model_dir={tmp_path}/plain"])
    launcher = ["tools/launch_local.py", "--workers", 1, "--input_servers", 2, "--"]
    finished = run_python(
        [*launcher, *train, f"--model_dir={tmp_path}/served"], timeout=600, fresh=True
    )
    for server in range(2):
        assert f"[input server {server}] input server: listening at {HOST}:" in finished.stdout
    plain = losses(tmp_path / "plain")
    assert len(plain) == 12
    assert losses(tmp_path / "served") == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_training_ends_when_a_server_does(digits, tmp_path):
    with running_server() as (server, address):
        flags = [f"--data_dir={digits}", f"--model_dir={tmp_path}", f"--input_servers={address}"]
        training = subprocess.Popen(
            [sys.executable, "-m", "imagenet_fast", *TRAIN, *flags, "--duration=9999 epochs"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert any(re.search(r"[1-9]/\d+ ETA", line) for line in training.stderr)
            server.kill()
            _, errors = training.communicate(timeout=100)
        finally:
            training.kill()
    assert training.returncode == 2
    assert f"error: input server {address} is unavailable" in errors
    assert "the same command resumes from the last checkpoint" in errors
