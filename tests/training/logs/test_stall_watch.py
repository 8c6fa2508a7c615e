"""What is told of files that are slow or missing, with named pipes, which block who opens them."""

import contextlib
import functools
import os
import re
import shutil
import threading
import time
import types

import pytest
import tf_keras as keras
from small_network import small_network

from imagenet_fast import Config, UserError, train
from imagenet_fast.training.logs import loggers, stall_watch
from imagenet_fast.training.logs.stall_watch import StallWatch

LIMIT = 0.5


def release(pipe):
    """Lets all go on that are about to open a pipe."""
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "good"
    path.write_bytes(bytes(10_000))
    return path


@pytest.fixture
def make_pipe(tmp_path):
    """Makes files that hang until the test ends: make_pipe(name)."""
    pipes = []

    def make(name):
        pipes.append(tmp_path / name)
        pipes[-1].unlink(missing_ok=True)
        os.mkfifo(pipes[-1])
        return pipes[-1]

    yield make
    for pipe in pipes:
        release(pipe)


@pytest.fixture
def told(monkeypatch):
    """The lines that are told, with their times."""
    lines = []

    def write(line, file):
        lines.append((time.monotonic(), line))

    monkeypatch.setattr(stall_watch, "tqdm", types.SimpleNamespace(write=write))
    return lines


@pytest.fixture
def looks(monkeypatch):
    """The times at which files have been looked at."""
    times = []

    class Noting(stall_watch._Probe):
        def problems(self):
            times.append(time.monotonic())
            return super().problems()

    monkeypatch.setattr(stall_watch, "_Probe", Noting)
    return times


@pytest.fixture
def start():
    """Starts a watch that ends with the test: start(path, ..., patience=...)."""
    with contextlib.ExitStack() as stack:

        def begin(*paths, patience=0.2, limit=LIMIT, pause=0.3):
            watch = StallWatch(list(map(str, paths)), patience=patience, limit=limit, pause=pause)
            stack.callback(watch.close)
            return watch

        yield begin


def wait_for(lines, number=1):
    deadline = time.monotonic() + 60
    while len(lines) < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_slow_and_missing_files_are_named_at_the_start(start, shard, make_pipe, tmp_path, told):
    pipe, missing = make_pipe("hangs"), tmp_path / "missing"
    start(shard, pipe, missing)
    wait_for(told)
    assert re.fullmatch(
        rf"slow or missing files: {pipe} \(nothing read for \d+ s\), {missing} \(No such file or "
        r"directory\)",
        told[0][1],
    )


def test_a_slow_file_that_is_read_in_the_end(start, shard, told, monkeypatch):
    read = stall_watch._read_a_little

    def slow(path):
        read(path)
        time.sleep(0.7)

    monkeypatch.setattr(stall_watch, "_read_a_little", slow)
    start(shard)
    wait_for(told)
    assert told[0][1] == f"slow or missing files: {shard} (1 s for 4096 bytes)"


def test_three_of_many_are_named(start, tmp_path, told):
    start(*(tmp_path / str(number) for number in range(40)))
    wait_for(told)
    assert told[0][1].count("No such file or directory") == 3
    assert told[0][1].endswith(", 37 more")


def test_a_file_that_hangs_later_is_named_when_steps_stop(start, shard, make_pipe, told, looks):
    watch = start(shard)
    wait_for(looks)
    pipe = make_pipe(shard.name)
    watch.after_steps(1)
    stopped = time.monotonic()
    wait_for(told)
    match = re.fullmatch(
        rf"no step has ended for (\d+) s; slow or missing files: {pipe} \(nothing read for \d+ s\)",
        told[0][1],
    )
    assert match
    assert int(match[1]) <= told[0][0] - stopped


def test_a_warning_repeats_after_a_pause_without_more_threads(start, make_pipe, told):
    watch = start(make_pipe("hangs"), pause=0.4)
    watch.after_evaluation_steps(1)
    wait_for(told)
    threads = threading.active_count()
    wait_for(told, 4)
    assert threading.active_count() == threads
    times = [at for at, _ in told]
    assert all(later - earlier >= 0.4 for earlier, later in zip(times, times[1:]))
    seconds = [int(re.search(r"nothing read for (\d+) s", line)[1]) for _, line in told]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0


def test_slow_steps_give_no_warning(start, shard, told, looks):
    watch = start(shard)
    watch.after_steps(1)
    wait_for(looks, 3)
    watch.close()
    assert told == []


def test_nothing_is_probed_before_the_first_step_ends(start, shard, make_pipe, told, looks):
    """It compiles."""
    start(shard)
    wait_for(looks)
    make_pipe(shard.name)
    time.sleep(1.0)
    assert len(looks) == 1
    assert told == []


def test_a_normal_run_is_probed_once(start, shard, looks):
    watch = start(shard, patience=1.0, pause=0.1)
    for step in range(75):
        watch.after_steps(step)
        time.sleep(0.02)
    assert len(looks) == 1


def test_without_files_there_is_no_thread(start):
    before = threading.active_count()
    start()
    assert threading.active_count() == before


def test_a_file_that_hangs_blocks_neither_close_nor_exit(make_pipe, run_python):
    program = """
import sys, time
from imagenet_fast.training.logs.stall_watch import StallWatch
for limit in (0.1, 60.0):
    watch = StallWatch(sys.argv[1:], limit=limit)
    time.sleep(0.5)
    start = time.monotonic()
    watch.close()
    print(time.monotonic() - start)
"""
    finished = run_python(["-c", program, make_pipe("hangs")], timeout=60)
    assert all(float(seconds) < 0.9 for seconds in finished.stdout.split())
    assert finished.stderr.count("hangs (nothing read for 0 s)") == 1


class Hang(keras.callbacks.Callback):
    """Puts a pipe in the place of a shard after three steps."""

    def __init__(self, shard, put_aside):
        super().__init__()
        self._shard, self._aside = shard, put_aside

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 3:
            self._shard.rename(self._aside)
            os.mkfifo(self._shard)


@pytest.mark.long
def test_a_run_names_the_shard_that_it_waits_for(digits, tmp_path, monkeypatch):
    shutil.copytree(digits, tmp_path / "data")
    shard, aside = tmp_path / "data" / "train-00005-of-00008", tmp_path / "aside"
    lines = []

    def write(line, file):
        lines.append(line)
        if aside.exists() and f"{shard} (nothing" in line:
            pipe = os.open(shard, os.O_RDWR | os.O_NONBLOCK)
            aside.replace(shard)
            os.close(pipe)

    monkeypatch.setattr(stall_watch, "tqdm", types.SimpleNamespace(write=write))
    watch = functools.partial(StallWatch, patience=0.5, limit=0.3, pause=0.5)
    monkeypatch.setattr(loggers, "StallWatch", watch)
    config = Config(
        data_dir=str(shard.parent),
        model_dir=str(tmp_path / "run"),
        image_size=16,
        train_crop="none",
        batch_size=32,
        shuffle_buffer=200,
        warmup="0 steps",
        decay_at="100 steps",
        duration="132 steps",  # three epochs: what is open when the pipe comes stays readable
        eval_every="200 steps",
        steps_per_call="1",
        tensorboard=False,
        examine=False,
        strategy="one_device",
    )
    # The reader finds that a pipe is no file.
    with contextlib.suppress(UserError):
        train(config, callbacks=[Hang(shard, aside)], model=small_network)
    waited = [line for line in lines if str(shard) in line]
    assert re.match(
        rf"no step has ended for \d+ s; slow or missing files: {shard} \(nothing read for",
        waited[0],
    )
    assert not aside.exists()
