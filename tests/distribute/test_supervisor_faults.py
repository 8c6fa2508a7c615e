"""Supervisors in a simulated cluster, with random faults and a slow file server.

Each supervisor is a thread; exactly one runs at a time, until its next access to a file. Training
consists of groups: as soon as all workers of a start are there, they write a checkpoint every five
seconds.
"""

import dataclasses
import random
import signal
import subprocess
import threading

import pytest

from imagenet_fast.distribute import supervisor as supervisor_module
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.supervisor import Patience, Supervisor

pytestmark = pytest.mark.slow

PATIENCE = Patience(wait=30, beat=2, lost_after=20, end=4)
TICK = 0.5
FAULTS_END, LIMIT = 300.0, 1500.0
LAST_STEP = 40


class _Crashed(BaseException):
    pass


class World:
    """A clock, the files, and the trainings that run."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.size = self.random.choice([2, 3, 4])
        self.time, self.step = 0.0, -1
        self.trainings, self.said, self.errors = [], [], []
        self._files = {}

    def monotonic(self):
        return self.time

    def has_faults(self):
        return self.time < FAULTS_END

    def write(self, name, value, writer=None):
        self._files.setdefault(name, []).append((self.time, value, writer))

    def read(self, name, reader):
        """Returns what a reader sees: its own writes, others' later, nothing older than before."""
        lag = self.random.choice([0, 0, 0, 0, 0, 1, 2, 5]) if self.has_faults() else 0
        value, last = None, -1
        for place, (written, content, writer) in enumerate(self._files.get(name, [])):
            known = writer is reader or place <= reader.seen.get(name, -1)
            if known or written <= self.time - lag:
                value, last = content, place
        reader.seen[name] = last
        return value

    def advance_trainings(self):
        """Returns the first workers of the groups that train."""
        for training in list(self.trainings):
            if training.ends_at <= self.time:
                training.end(training.ends_with)
        for first in list(self.trainings):
            if first.group or first.index != first.workers[0] or self.time < first.began + 2:
                continue
            same = {
                other.index: other
                for other in self.trainings
                if other.workers == first.workers and not other.group
            }
            if len(same) == len(first.workers):
                for member in same.values():
                    member.group, member.step, member.due = list(same.values()), self.step, 5
                    member.due += self.time
        training_now = []
        for training in list(self.trainings):
            if any(other.returncode not in (None, 0) for other in training.group):
                if training.ends_with is None:  # An all-reduce fails, or hangs.
                    training.end_in(self.random.choice([0.5, 2, 6, LIMIT]), 1)
            elif training.group and training.index == training.workers[0]:
                training_now.append(training)
                if self.time >= training.due:
                    training.due += 5
                    training.step += 1
                    self.step = training.step
                if self.step >= LAST_STEP:
                    for member in training.group:
                        member.end(0)
        return training_now


class Training:
    """A process that trains, as far as supervisors see it."""

    def __init__(self, worker, workers):
        self.worker, self.index, self.workers = worker, worker.index, workers
        self.world = worker.world
        self.began, self.ends_at, self.ends_with = self.world.time, LIMIT, None
        self.returncode, self.group = None, []
        self.ignores_sigterm = self.world.random.random() < 0.3
        self.world.trainings.append(self)

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        end = self.world.time + (LIMIT if timeout is None else timeout)
        while self.returncode is None:
            if self.world.time >= end:
                raise subprocess.TimeoutExpired("training", timeout)
            self.worker.sleep(TICK)
        return self.returncode

    def end_in(self, seconds, status):
        self.ends_at, self.ends_with = self.world.time + seconds, status

    def end(self, status):
        if self.returncode is None:
            self.returncode = status
            self.world.trainings.remove(self)


class Simulated(Supervisor):
    """A supervisor whose training processes are simulated."""

    def _start_training(self, start):
        self._trains = start
        self._training = Training(self.worker, start.workers)
        self._beat = dataclasses.replace(self._beat, start=start.number, running=True, status=None)

    def _send(self, number):
        if number == signal.SIGKILL:
            self._training.end(-number)
        elif not self._training.ignores_sigterm:
            self._training.end_in(self.worker.world.random.uniform(0, 2), -number)

    def _say(self, text):
        self.worker.world.said.append(text)


class Worker:
    """A thread with a supervisor, and its view of the files, in place of a ``Board``."""

    def __init__(self, world, index):
        self.world, self.index = world, index
        self.until, self.ended, self.seen = 0.0, False, {}
        self._turn, self._yielded = threading.Semaphore(0), threading.Semaphore(0)
        cluster = Cluster(tuple(f"host{n}:1" for n in range(world.size)), index)
        self.supervisor = Simulated(
            cluster, None, [], lambda: world.step, PATIENCE, world.monotonic
        )
        self.supervisor.worker = self
        threading.Thread(target=self._main, daemon=True).start()

    @property
    def training(self):
        return self.supervisor._training

    def _main(self):
        self._turn.acquire()
        try:
            self._supervise()
        except _Crashed:
            pass
        except Exception as error:
            self.world.errors.append(error)
        if self.training is not None:
            self.training.end(-9)
        self.ended = True
        self._yielded.release()

    def _supervise(self):
        self.write_beat(self.index, self.supervisor._beat)
        earlier = self.start()
        if earlier is not None and earlier.status is not None:
            self.supervisor._ended_before = earlier.number
        while self.supervisor._round_on(self) is None:
            end = self.world.time + PATIENCE.beat
            while self.world.time < end and not (self.training and self.training.returncode):
                self.sleep(TICK)
        self.world.write(self.index, None)

    def sleep(self, seconds):
        self.until = self.world.time + seconds
        self._yielded.release()
        self._turn.acquire()
        if self.ended:
            raise _Crashed

    def run(self):
        """Lets it run for this moment."""
        while not self.ended and self.until <= self.world.time:
            self._turn.release()
            self._yielded.acquire()

    def crash(self):
        self.ended = True
        self._turn.release()
        self._yielded.acquire()

    def write_beat(self, index, beat):
        self._access()
        self.world.write(index, beat, self)

    def beats(self):
        found = {}
        for index in range(self.world.size):
            self._access()
            found[index] = self.world.read(index, self)
        return {index: beat for index, beat in found.items() if beat is not None}

    def write_start(self, start):
        self._access()
        self.world.write("start", start, self)

    def start(self):
        self._access()
        return self.world.read("start", self)

    def _access(self):
        is_slow = self.world.has_faults() and self.world.random.random() < 0.02
        self.sleep(self.world.random.uniform(0, 3) if is_slow else 0)


@pytest.mark.parametrize("seed", range(30))
def test_jobs_with_random_faults_end_and_give_up_only_after_three_starts(seed, monkeypatch):
    world = World(seed)
    monkeypatch.setattr(supervisor_module, "time", world)
    draw = world.random
    risk = draw.choice([0.0005, 0.001, 0.0025, 0.005])
    begins, workers = {index: draw.uniform(0, 5) for index in range(world.size)}, {}
    overlap = 0.0
    while (begins or workers) and world.time < LIMIT:
        for index in [index for index, when in begins.items() if world.time >= when]:
            del begins[index]
            workers[index] = Worker(world, index)
        for worker in draw.sample(list(workers.values()), len(workers)):
            worker.run()
        workers = {index: worker for index, worker in workers.items() if not worker.ended}
        for index, worker in list(workers.items()) if world.has_faults() else []:
            if draw.random() < risk:
                worker.crash()
                del workers[index]
                begins[index] = world.time + draw.choice([0.5, 3, 10, 40, 80])
            elif draw.random() < risk:  # it is paused
                worker.until = world.time + draw.choice([3, 19, 23, 40])
            elif draw.random() < risk and worker.training is not None:
                worker.training.end(-9)
        groups = world.advance_trainings()
        paused = any(
            member.worker.until > world.time + TICK for first in groups for member in first.group
        )
        overlap = overlap + TICK if len(groups) > 1 and not paused else 0.0
        assert overlap <= 2 * PATIENCE.beat + PATIENCE.end, "two trainings at once"
        world.time += TICK
    for worker in workers.values():
        worker.crash()
    assert not workers and not world.errors
    assert world.step >= LAST_STEP or any("giving up" in text for text in world.said)
    assert not [text for text in world.said if "giving up after" in text and "3" not in text]
