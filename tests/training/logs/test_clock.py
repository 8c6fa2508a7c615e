import json

import pytest

from imagenet_fast.training.logs.clock import Clock


class Time:
    """A clock's ``now`` that stands still until it is told to pass."""

    def __init__(self, start=1000.0):
        self.now = start

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


def test_nothing_yet():
    clock = Clock(Time())
    assert (clock.train_seconds, clock.compile_seconds, clock.timed_images) == (0, 0, 0)
    assert clock.wall_seconds == 0
    assert clock.images_per_second == 0


def test_paused_time_is_not_training_time():
    time = Time()
    clock = Clock(time)
    clock.compiled()
    time.passes(3)
    with clock.paused():
        time.passes(20)
    time.passes(4)
    clock.advance(70)
    assert (clock.train_seconds, clock.images_per_second) == (7, 10)
    clock.stop()
    with clock.paused():  # as after an evaluation
        time.passes(20)
    time.passes(20)
    clock.advance(0)
    assert clock.train_seconds == 7
    assert clock.wall_seconds == 67


def test_a_run():
    """Compilation and evaluation are no training time; all is wall time."""
    time = Time()
    clock = Clock(time)
    time.passes(20)  # building the model, and the first step
    clock.compiled()
    assert clock.compile_seconds == 20
    time.passes(4)
    clock.advance(400)
    time.passes(1)
    clock.advance(100)
    assert (clock.train_seconds, clock.timed_images) == (5, 500)
    assert clock.images_per_second == 100

    time.passes(0.5)
    clock.stop()
    time.passes(30)  # evaluation
    clock.start()
    assert clock.train_seconds == 5.5
    time.passes(4.5)
    clock.advance(300)
    clock.stop()
    assert (clock.train_seconds, clock.timed_images) == (10, 800)
    assert clock.images_per_second == 80
    assert clock.compile_seconds == 20
    time.passes(7)
    assert clock.wall_seconds == 20 + 5 + 0.5 + 30 + 4.5 + 7


def test_compiling_a_second_program_is_not_training_time():
    """As that for images of another size."""
    time = Time()
    clock = Clock(time)
    time.passes(20)
    clock.compiled()
    time.passes(4)
    clock.compiling()
    time.passes(30)
    clock.advance(0)
    clock.compiled()
    time.passes(1)
    clock.advance(100)
    assert (clock.train_seconds, clock.timed_images) == (5, 100)
    assert clock.compile_seconds == 50
    assert clock.wall_seconds == 55


def test_wall_time_passes_by_itself():
    time = Time()
    clock = Clock(time)
    time.passes(3)
    assert clock.wall_seconds == 3
    assert clock.train_seconds == 0


def test_nothing_counts_before_the_first_step_has_ended():
    time = Time()
    clock = Clock(time)
    time.passes(5)
    clock.advance(64)
    clock.stop()
    assert (clock.train_seconds, clock.timed_images) == (0, 0)


def test_nothing_counts_while_stopped():
    time = Time()
    clock = Clock(time)
    clock.compiled()
    clock.stop()
    time.passes(5)
    clock.advance(64)
    clock.stop()
    assert (clock.train_seconds, clock.timed_images) == (0, 0)


def test_restarts():
    """Nothing counts while no process runs; each process compiles."""
    time = Time()
    first = Clock(time)
    time.passes(20)
    first.compiled()
    time.passes(10)
    first.advance(1000)
    state = json.loads(json.dumps(first.state()))
    time.passes(2)  # lost: the process dies before the next checkpoint
    first.advance(200)

    time = Time(start=7.0)  # another machine
    second = Clock(time)
    time.passes(1)
    second.restore(state)
    assert second.wall_seconds == 31
    time.passes(14)
    second.compiled()
    time.passes(10)
    second.advance(500)
    assert second.train_seconds == 20
    assert second.timed_images == 1500
    assert second.images_per_second == 75
    assert second.compile_seconds == 35
    assert second.wall_seconds == 20 + 10 + 1 + 14 + 10

    time.passes(5)
    third = Clock(Time())
    third.restore(second.state())
    assert third.wall_seconds == second.wall_seconds == 60


def test_state_is_numbers_only():
    state = Clock(Time()).state()
    assert set(state) == {"train_seconds", "timed_images", "compile_seconds", "wall_seconds"}
    with pytest.raises(KeyError):
        Clock(Time()).restore({"train_seconds": 1.0})


def test_real_time_by_default():
    clock = Clock()
    clock.compiled()
    clock.advance(1)
    assert 0 <= clock.train_seconds <= clock.wall_seconds < 60
