"""Ctrl-C and SIGTERM beside forks, handlers, descriptors and outputs of others."""

import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time

import keras
import pytest
from forking import ROOT

from imagenet_fast import Config, train
from imagenet_fast.training.checkpoints.model_dir import checkpoint_steps
from imagenet_fast.training.interrupt import Interrupt


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def noting():
    interrupt = Interrupt()
    interrupt.waits = True
    return interrupt


def run_noting(lines, **options):
    """Runs lines in a process that notes signals, as ``interrupt``, and returns what is left."""
    script = "\n".join(
        [
            "import os, signal, sys, time",
            "from imagenet_fast.training.interrupt import Interrupt",
            "signal.signal(signal.SIGINT, signal.default_int_handler)",
            "interrupt = Interrupt(seconds=0.5)",
            "interrupt.waits = True",
            "with interrupt.noted():",
            *(f"    {line}" for line in lines),
        ]
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, timeout=60, check=False, **options
    )


def test_a_fork_ends_by_its_signals_and_this_process_does_not():
    # As of multiprocessing in a callback, which ends its processes by SIGTERM.
    ended = run_noting(
        [
            "child = os.fork()",
            "if not child:",
            "    time.sleep(30)",
            "    os._exit(0)",
            "time.sleep(0.2)",
            "os.kill(child, signal.SIGTERM)",
            "time.sleep(1.0)",
            "pid, status = os.waitpid(child, os.WNOHANG)",
            "pid or os.kill(child, signal.SIGKILL)",
            "print(pid == child and os.WTERMSIG(status), interrupt.signal)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "15 None\n")


def test_sigterm_ends_a_process_that_hangs_and_whose_lines_nobody_reads():
    read, write = os.pipe()
    os.close(read)
    start = time.monotonic()
    ended = run_noting(["os.kill(os.getpid(), signal.SIGTERM)", "time.sleep(30)"], stderr=write)
    os.close(write)
    assert ended.returncode == 143
    assert time.monotonic() - start < 25


def test_a_callers_handler_that_was_set_meanwhile_stays():
    def handler(number, frame):
        pass

    before = signal.getsignal(signal.SIGTERM)
    try:
        interrupt = noting()
        with interrupt.noted():
            signal.signal(signal.SIGTERM, handler)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert interrupt.signal == signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def test_both_signals_at_once():
    # While TensorFlow works, Python calls neither handler, and then first that of SIGINT.
    ended = run_noting(
        [
            "import ctypes",
            "list(map(ctypes.CDLL(None).kill, [os.getpid()] * 2, [signal.SIGTERM, signal.SIGINT]))",
            "time.sleep(30)",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert "race" not in ended.stderr


def test_what_waits_for_signals_already_gets_them_too():
    # As asyncio's loop, which would not call the handlers of other signals.
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    signal.set_wakeup_fd(write)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with noting().noted():
            signal.raise_signal(signal.SIGUSR1)
        assert os.read(read, 2) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(-1) == write
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


def test_beside_more_than_a_thousand_open_files(capsys):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("fewer files may be open")
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with noting().noted():
            signal.raise_signal(signal.SIGINT)
    finally:
        for file in files:
            os.close(file)
    assert "SIGINT: the run saves" in capsys.readouterr().err


def test_each_run_of_a_process_says_what_a_signal_does(capsys):
    for _ in range(2):
        with noting().noted():
            signal.raise_signal(signal.SIGINT)
        assert "SIGINT: the run saves" in capsys.readouterr().err


class SignalAt(keras.callbacks.Callback):
    """Sends Ctrl-C at the beginning of a method."""

    def __init__(self, method):
        super().__init__()
        setattr(self, method, lambda *_, **__: signal.raise_signal(signal.SIGINT))


def test_no_more_steps_after_a_signal_between_them(digits, tmp_path):
    config = Config(
        data_dir=digits,
        model="resnet8",
        image_size=8,
        train_crop="pad",
        crop_padding=1,
        batch_size=4,
        duration="6 steps",
        warmup="0 steps",
        log_every="1 step",
        eval_every="3 steps",
        checkpoint_every="2 steps",
        examine=False,
        tensorboard=False,
        model_dir=str(tmp_path / "run"),
    )

    def steps():
        return checkpoint_steps(tmp_path / "run" / "checkpoints")

    threads = threading.active_count()
    # After a step, in an evaluation, and at the end, where all is saved.
    for method, saved in [("on_train_batch_end", 1), ("on_test_end", 3), ("on_train_end", 6)]:
        with pytest.raises(KeyboardInterrupt):
            train(config, callbacks=[SignalAt(method)])
        assert max(steps()) == saved
        assert threading.active_count() <= threads + 1
    assert train(config)["epochs"] > 0
    assert pathlib.Path(config.model_dir, "report.html").exists()
