"""Ctrl-C and SIGTERM while a run trains."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
from forking import ROOT
from interrupt_job import Ask
from model_weights import weights_in
from small_network import small_network

from imagenet_fast import Config, train
from imagenet_fast.training.checkpoints.model_dir import (
    CHECKPOINTS,
    checkpoint_steps,
    latest_checkpoint,
)
from imagenet_fast.training.interrupt import Interrupt
from imagenet_fast.training.logs.metrics_file import read_rows
from imagenet_fast.training.segments import read_segments

OPTIONS = {
    "image_size": 8,
    "train_crop": "pad",
    "crop_padding": 1,
    "batch_size": 32,
    "learning_rate_batch": 32,
    "warmup": "0 steps",
    "duration": "14 steps",
    "eval_every": "6 steps",
    "log_every": "3 steps",
    "checkpoint_every": "20 steps",
    "steps_per_call": "2",
    "strategy": "one_device",
    "tensorboard": False,
    "examine": False,
}


@pytest.fixture(autouse=True)
def usual_handlers():
    """Those of a program in a terminal: tests may run where Ctrl-C is ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    found = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert found == {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def run(digits, model_dir, *callbacks, **changes):
    config = Config(data_dir=digits, model_dir=str(model_dir), **{**OPTIONS, **changes})
    return train(config, model=small_network, callbacks=callbacks)


def rows_of(model_dir):
    """The rows without times."""
    times = {"train_seconds", "wall_seconds", "images_per_second"}
    rows = read_rows(str(model_dir))
    return [{name: row[name] for name in row.keys() - times} for row in rows]


def last_step(model_dir):
    path = pathlib.Path(latest_checkpoint(model_dir / CHECKPOINTS))
    return int(path.name.removeprefix("ckpt-"))


@pytest.fixture(scope="module")
def uninterrupted(digits, tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    run(digits, model_dir)
    return model_dir


@pytest.mark.parametrize(
    ("number", "error", "place", "step"),
    [
        # After the calls of 1 and 2 steps, of which there is a row, and another one.
        (signal.SIGTERM, SystemExit, {"batch": 3}, 5),
        (signal.SIGINT, KeyboardInterrupt, {"evaluation": 1}, 6),
    ],
)
def test_a_run_that_is_asked_to_end_saves_and_goes_on_as_if_not(
    number, error, place, step, digits, uninterrupted, tmp_path
):
    model_dir = tmp_path / "run"
    with pytest.raises(error) as raised:
        run(digits, model_dir, Ask(number, **place))
    if error is SystemExit:
        assert raised.value.code == 143
    assert last_step(model_dir) == step
    run(digits, model_dir)
    expected, found = weights_in(uninterrupted), weights_in(model_dir)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert rows_of(model_dir) == rows_of(uninterrupted)


def test_the_first_call_is_not_waited_for(digits, tmp_path):
    """It compiles, which may take minutes."""
    waits = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            waits.append(len(waits))
            if len(waits) == 1:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(digits, tmp_path / "run", Look())
    assert waits == [0]
    assert latest_checkpoint(tmp_path / "run" / CHECKPOINTS) is None


def test_a_second_ctrl_c_ends_at_once():
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt), interrupt.noted():
        interrupt.waits = True
        signal.raise_signal(signal.SIGINT)
        assert interrupt.signal is signal.SIGINT
        signal.raise_signal(signal.SIGINT)
        pytest.fail("still there")


@pytest.mark.slow
def test_workers_save_and_end_together_whichever_gets_the_signal(digits, tmp_path, run_python):
    options = {**OPTIONS, "data_dir": digits, "strategy": "multi_worker"}
    job = pathlib.Path(__file__).with_name("interrupt_job.py")
    finished = run_python([job, json.dumps(options), tmp_path], workers=2)
    ends = sorted(
        line.partition("|")[2] for line in finished.stdout.splitlines() if "ends|" in line
    )
    # The other worker ends as after SIGTERM.
    stopped = "SystemExit(143)"
    assert ends == [f"{stopped}|KeyboardInterrupt()|done", f"{stopped}|{stopped}|done"]
    assert finished.stderr.count("another worker got a signal: the run saves a checkpoint") == 2
    whole, run = tmp_path / "whole", tmp_path / "run"
    # After calls of 1, 2 and 2 steps, then 1 and 2, then to the end.
    steps = [segment["step"] for segment in read_segments(str(run))]
    assert steps == [0, 5, 8]
    expected, found = weights_in(whole), weights_in(run)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Each checkpoint averages batch norm's statistics over the replicas.
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    for row, same in zip(rows_of(run), rows_of(whole), strict=True):
        kinds = row.pop("kind"), same.pop("kind")
        assert kinds[0] == kinds[1]
        assert row == pytest.approx(same, rel=1e-5)


def test_no_worker_ends_before_all_have_saved():
    """Who started them may end the others as soon as one has ended."""
    asked = []

    def any_worker(own):
        asked.append(own)
        return True

    interrupt = Interrupt(any_worker)
    assert interrupt.came() and interrupt.came()
    assert asked == [False]
    with pytest.raises(SystemExit):
        interrupt.end()
    assert asked == [False, True]


def test_other_threads_are_left_alone():
    def handler():
        return signal.getsignal(signal.SIGTERM)

    found = []

    def other():
        with Interrupt().noted():
            found.append(handler())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_handlers_of_the_caller_stay():
    own = []
    signal.signal(signal.SIGTERM, lambda *_: own.append(1))
    interrupt = Interrupt()
    with interrupt.noted():
        interrupt.waits = True
        signal.raise_signal(signal.SIGTERM)
    assert own == [1] and interrupt.signal is None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# In a call that Python cannot interrupt, as TensorFlow's.
BUSY = """
import hashlib, os, signal, sys, threading, time
from imagenet_fast.training.interrupt import Interrupt
signals = [getattr(signal, name) for name in sys.argv[2].split(",")]
interrupt = Interrupt(seconds=float(sys.argv[1]))
def send():
    for number in signals:
        time.sleep(1.3 if interrupt.waits else 0.3)
        os.kill(os.getpid(), number)
with interrupt.noted():
    interrupt.waits = sys.argv[3] == "waits"
    threading.Thread(target=send).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.mark.parametrize(
    ("seconds", "signals", "waits"),
    [
        ("0.5", "SIGTERM", "waits"),
        ("600", "SIGTERM,SIGTERM", "waits"),
        ("600", "SIGINT,SIGTERM", "waits"),
        ("600", "SIGTERM", "does not"),
    ],
)
def test_a_process_that_hangs_ends_by_sigterm(seconds, signals, waits):
    command = [sys.executable, "-c", BUSY, seconds, signals, waits]
    ended = subprocess.run(
        command,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 143, ended.stderr
    assert ("saves a checkpoint" in ended.stderr) == (waits == "waits")


# --- Beside forks, handlers, descriptors and outputs of others


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


def test_sigterm_that_comes_twice_at_once_is_one_request():
    """As of `systemctl stop`, and from the launcher that gets it, too."""
    ended = run_noting(
        [
            "for _ in range(3):",
            "    os.kill(os.getpid(), signal.SIGTERM)",
            "    time.sleep(0.1)",
            "print(interrupt.signal.name)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "SIGTERM\n")


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
