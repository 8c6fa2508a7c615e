"""The command ``input-server``, and training with it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from server_processes import HOST, ROOT, other_address, running, running_server

from imagenet_fast import commands
from imagenet_fast.base.addresses import free_port
from imagenet_fast.commands import servers


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


def test_only_this_machine_reaches_it_unless_an_address_is_named():
    other, ports = other_address(), [free_port(), free_port()]
    flags = [f"--port={ports[0]}", f"--worker_port={ports[1]}"]
    with running(
        "input-server", *flags, address=f"{HOST}:{ports[0]}", stderr=subprocess.PIPE
    ) as process:
        for port in ports:
            socket.create_connection((HOST, port), timeout=5).close()
            with pytest.raises(TimeoutError):
                socket.create_connection((other, port), timeout=0.5)
        process.kill()
        who, what = process.stderr.read().splitlines()
    assert who == (
        f"ports {ports[0]} and {ports[1]} have no password: every account of this machine, but no "
        "other machine, can connect"
    )
    assert what.startswith("and then run any TensorFlow operation here: read and write files")


@pytest.mark.parametrize("command", ["input-server", "stage-server"])
@pytest.mark.parametrize(
    ("host", "told"),
    [("198.51.100.7", "is no address of this machine"), ("0.0.0.0", "means all addresses")],
)
def test_hosts_that_are_not_an_address_of_this_machine(capsys, command, host, told):
    assert commands.run([command, f"--host={host}"]) == 2
    assert f"error: host {host} {told}" in capsys.readouterr().err


def test_a_name_that_others_resolve_differently(capsys, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    servers.check_reach("reader-0")
    assert capsys.readouterr().err == (
        "reader-0 is 127.0.1.1 on this machine, which others cannot reach: for them, give --host "
        "an address\n"
    )
    servers.check_reach("127.0.1.1")
    assert capsys.readouterr().err == ""


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
            assert any(re.search(r"[1-9]/\d+ steps, ETA", line) for line in training.stderr)
            server.kill()
            _, errors = training.communicate(timeout=100)
        finally:
            training.kill()
    assert training.returncode == 2
    assert f"error: input server {address} is unavailable" in errors
    assert "the same command resumes from the last checkpoint" in errors
