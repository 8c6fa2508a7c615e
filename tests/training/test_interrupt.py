"""Ctrl-C and SIGTERM while a run trains."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
from model_weights import weights_in
from small_network import small_network

from imagenet_fast import Config, train
from imagenet_fast.training.checkpoints.model_dir import CHECKPOINTS, latest_checkpoint
from imagenet_fast.training.interrupt import Interrupt
from imagenet_fast.training.logs.metrics_file import read_rows

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


class Ask(keras.callbacks.Callback):
    """Sends a signal to this process in the batch, or the evaluation, of the given number."""

    def __init__(self, number, *, batch=-1, evaluation=-1):
        super().__init__()
        self.number, self.batch, self.evaluation = number, batch, evaluation
        self.batches = self.evaluations = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == self.batch:
            signal.raise_signal(self.number)

    def on_test_begin(self, logs=None):
        self.evaluations += 1
        if self.evaluations == self.evaluation:
            signal.raise_signal(self.number)


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


def test_workers_and_other_threads_are_left_alone():
    def handler():
        return signal.getsignal(signal.SIGTERM)

    with Interrupt(noted=False).noted():
        assert handler() is signal.SIG_DFL
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
        time.sleep(0.3)
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
