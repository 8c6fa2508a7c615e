"""Supervisors as processes, whose training is a small script."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.members import Beat, Start
from imagenet_fast.distribute.supervisor import Patience, Supervisor

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
# Every wait below ends by then, whatever is broken.
PATIENCE = 30

SUPERVISE = """
import pathlib, sys
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.supervisor import Patience, Supervisor

folder, index, workers, wait = pathlib.Path(sys.argv[1]), *map(float, sys.argv[2:])
cluster = Cluster(tuple(f"host{n}:1" for n in range(int(workers))), int(index))
training = [sys.executable, "-c", (folder / "training.py").read_text(), folder, str(int(index))]

def newest_step():
    return int((folder / "step").read_text()) if (folder / "step").exists() else -1

patience = Patience(wait, beat=0.1, lost_after=1.5, end=1)
sys.exit(Supervisor(cluster, folder / "workers", training, newest_step, patience).run())
"""
# Adds a line to the log of its worker: those that take part. There is `step` to write a checkpoint,
# `wait_for` a condition, and `first`, whether this is the first start of this worker.
TRAINING = """
import os, pathlib, signal, sys, time

folder, index = pathlib.Path(sys.argv[1]), int(sys.argv[2])
workers = list(map(int, os.environ["IMAGENET_FAST_WORKERS"].split(",")))
log = folder / f"log{index}"
first = not log.exists()
with log.open("a") as file:
    file.write(f"{workers}\\n")

def step(number):
    new = folder / f"new{index}"  # Of each worker: several may write at once.
    new.write_text(str(number))
    new.replace(folder / "step")

def wait_for(condition):
    while not condition():
        time.sleep(0.02)

def started(worker):
    log = folder / f"log{worker}"
    return log.read_text().count(f"{workers}\\n") if log.exists() else 0

# The first worker must not be done before the others have begun.
wait_for(lambda: all(started(worker) >= started(index) for worker in workers))

"""


class Job:
    """Supervisors of a job in a folder."""

    def __init__(self, folder, training, workers, wait, stack):
        self.folder, self._workers, self._wait, self._stack = folder, workers, wait, stack
        (folder / "training.py").write_text(TRAINING + training)
        self.processes = {}

    def start(self, *indices):
        for index in indices:
            arguments = [self.folder, index, self._workers, self._wait]
            process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, *map(str, arguments)],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._stack.enter_context(process)
            self._stack.callback(process.kill)
            self.processes[index] = process

    def statuses(self):
        """Returns the statuses with which all end, in order of the workers."""
        self.errors = {}
        for index, process in self.processes.items():
            self.errors[index] = process.communicate(timeout=PATIENCE)[1]
        return [process.returncode for _, process in sorted(self.processes.items())]

    def starts(self, index):
        """Returns which workers took part in each start of a worker's training."""
        log = self.folder / f"log{index}"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def wait_for(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.fixture
def job(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda training="", workers=3, wait=3.0: Job(tmp_path, training, workers, wait, stack)


def test_all_workers_train_once(job, tmp_path):
    run = job("time.sleep(0.3)", wait=PATIENCE)
    run.start(0, 1, 2)
    assert run.statuses() == [0, 0, 0]
    assert [run.starts(index) for index in range(3)] == [[[0, 1, 2]]] * 3
    assert [path.name for path in (tmp_path / "workers").iterdir()] == ["start.json"]


def test_a_lost_worker_is_left_out_and_taken_back_at_a_checkpoint(job, tmp_path):
    training = """
if first:
    step(1)
if workers == [0, 1, 2] and first:
    if index == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    wait_for(lambda: False)
if workers == [0, 2]:
    if index == 0:
        wait_for((folder / "checkpoint now").exists)
        step(100)
    wait_for(lambda: False)
"""
    run = job(training)
    run.start(0, 1, 2)
    run.wait_for(lambda: [0, 2] in run.starts(0) and [0, 2] in run.starts(2))
    run.processes[1].wait(PATIENCE)
    run.start(1)
    time.sleep(1)
    # Not before there is a new checkpoint.
    assert run.starts(0) == [[0, 1, 2], [0, 2]]
    (tmp_path / "checkpoint now").touch()
    assert run.statuses() == [0, 0, 0]
    assert run.starts(0) == run.starts(2) == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert run.starts(1) == [[0, 1, 2]] * 2
    assert "worker 1 lost" in run.errors[0]
    assert "starting with 2 workers, without worker 1" in run.errors[0]


def test_the_first_worker_may_be_lost(job):
    training = """
if 0 in workers:
    if index == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    wait_for(lambda: False)
"""
    run = job(training)
    run.start(0, 1, 2)
    assert run.statuses() == [-9, 0, 0]
    assert run.starts(2) == [[0, 1, 2], [1, 2]]
    assert "waiting up to" in run.errors[1]


# Training that notes SIGTERM ends with the status 143.
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(143)"])
def test_a_killed_training_process_starts_again_at_once(job, end):
    training = f"""
if first:
    if index == 1:
        {end}
    sys.exit(2)  # The others cannot go on without it.
"""
    run = job(training, wait=PATIENCE)
    run.start(0, 1, 2)
    assert run.statuses() == [0, 0, 0]
    assert [run.starts(index) for index in range(3)] == [[[0, 1, 2]] * 2] * 3


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_error_of_the_training_ends_the_job_unless_it_wrote_a_checkpoint(job, checkpoint):
    training = f"""
if first and {checkpoint}:
    step(7)
    time.sleep(0.2)
if index == 1:
    sys.exit(2)
wait_for(lambda: False)
"""
    run = job(training, wait=PATIENCE)
    run.start(0, 1, 2)
    assert run.statuses() == [2, 2, 2]
    assert len(run.starts(0)) == (2 if checkpoint else 1)
    assert "without a new checkpoint" in run.errors[0]


def test_a_job_whose_workers_are_always_killed_ends(job):
    run = job("os.kill(os.getpid(), signal.SIGKILL)", workers=2, wait=PATIENCE)
    run.start(0, 1)
    assert run.statuses() == [1, 1]
    assert len(run.starts(0)) == 3
    assert "giving up after 3 starts without a new checkpoint" in run.errors[0]


def test_training_that_ignores_sigterm_is_killed(job, monkeypatch):
    training = """
if first and index == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "ready").touch()
    wait_for(lambda: False)
if first:
    wait_for((folder / "ready").exists)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run = job(training, workers=2, wait=PATIENCE)
    run.start(0, 1)
    assert run.statuses() == [0, 0]
    assert run.starts(0) == [[0, 1]] * 2


def test_sigterm_ends_a_worker_and_the_others_go_on(job):
    run = job("if 1 in workers: wait_for(lambda: False)", wait=3)
    run.start(0, 1, 2)
    run.wait_for(lambda: all(run.starts(index) for index in range(3)))
    run.processes[1].terminate()
    assert run.statuses() == [0, 143, 0]
    assert run.starts(0)[-1] == [0, 2]


def test_ctrl_c_ends_a_worker_and_its_training(job):
    run = job("(folder / 'pid').write_text(str(os.getpid()))\nwait_for(lambda: False)", workers=1)
    run.start(0)
    run.wait_for((run.folder / "pid").exists)
    run.processes[0].send_signal(signal.SIGINT)
    run.statuses()
    assert "KeyboardInterrupt" in run.errors[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int((run.folder / "pid").read_text()), 0)


def test_training_does_not_outlive_its_supervisor(job):
    run = job("(folder / 'pid').write_text(str(os.getpid()))\nwait_for(lambda: False)", workers=1)
    run.start(0)
    run.wait_for((run.folder / "pid").exists)
    run.processes[0].kill()
    training = int((run.folder / "pid").read_text() or 0)

    def has_ended():
        try:
            os.kill(training, 0)
        except ProcessLookupError:
            return True
        return False

    run.wait_for(has_ended)


def test_it_starts_without_workers_that_do_not_come(job):
    run = job(workers=4, wait=1)
    run.start(1, 3)
    assert run.statuses() == [0, 0]
    assert run.starts(1) == run.starts(3) == [[1, 3]]
    assert "for workers 0, 2" in run.errors[1]


def test_files_of_an_earlier_job_do_not_count(job, tmp_path):
    folder = tmp_path / "workers"
    folder.mkdir()
    start = Start(9, (0, 1, 2), ("a", "b", "c"), step=5, fruitless=2, over="failed", status=2)
    (folder / "start.json").write_text(json.dumps(vars(start)))
    (folder / "2.json").write_text(json.dumps(vars(Beat("c", 1000, 9, True))))
    run = job()
    run.start(0, 1)
    assert run.statuses() == [0, 0]
    assert run.starts(0) == [[0, 1]]


@pytest.mark.parametrize("over", ["", "lost"])
def test_an_earlier_job_that_was_killed_as_a_whole_does_not_count(job, tmp_path, over):
    (tmp_path / "workers").mkdir()
    start = Start(9, (0, 1), ("a", "b"), fruitless=2, over=over)
    (tmp_path / "workers" / "start.json").write_text(json.dumps(vars(start)))
    run = job(workers=2, wait=PATIENCE)
    run.start(0, 1)
    assert run.statuses() == [0, 0]
    assert json.loads((tmp_path / "workers" / "start.json").read_text())["fruitless"] == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        json.dumps({**vars(Start(1, (0,), ("a",))), "workers": [-1]}).encode(),
        json.dumps({**vars(Start(1, (0,), ("a",))), "workers": [1, 0]}).encode(),
        json.dumps({**vars(Start(1, (0,), ("a",))), "processes": []}).encode(),
        json.dumps(vars(Start(1, (0, 7), ("a", "b")))).encode(),
        json.dumps({"process": 1, "count": -1}).encode(),
    ],
)
def test_damaged_files_count_as_missing(job, tmp_path, content):
    (tmp_path / "workers").mkdir()
    for name in ("start.json", "1.json"):
        (tmp_path / "workers" / name).write_bytes(content)
    run = job(workers=2, wait=0.5)
    run.start(0)
    assert run.statuses() == [0]
    assert run.starts(0) == [[0]]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_text(""), "File exists"),
        (lambda path: path.symlink_to(path.parent), "is a link, through which nothing is written"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path, make, reason):
    make(tmp_path / "workers")
    cluster = Cluster(("host0:1", "host1:1"), 0)
    supervisor = Supervisor(cluster, tmp_path / "workers", [], lambda: -1, Patience(0))
    with pytest.raises(UserError, match=f"workers know of each other, cannot be used: {reason}"):
        supervisor.run()
    assert [path.name for path in tmp_path.iterdir()] == ["workers"]


def test_a_second_job_in_the_folder_is_refused_and_the_first_one_goes_on(job, tmp_path):
    training = "wait_for((folder / 'enough').exists)"
    first = job(training, workers=2)
    first.start(0, 1)
    first.wait_for(lambda: first.starts(0) and first.starts(1))
    second = job(training, workers=2)
    second.start(0, 1)
    second.statuses()
    assert "another process is worker 0 of a job" in second.errors[0]
    assert "another process is worker 1 of a job" in second.errors[1]
    (tmp_path / "enough").touch()
    assert first.statuses() == [0, 0]
    assert first.starts(0) == first.starts(1) == [[0, 1]]


def test_a_supervisor_ends_once_another_has_its_place(job, tmp_path):
    """As one whose machine was away while another took its place."""
    run = job("wait_for(lambda: False)", workers=2, wait=0.1)
    run.start(0)
    run.wait_for(lambda: run.starts(0))
    beats = map(functools.partial(Beat, "other"), itertools.count())

    def ended_at_a_beat():
        # Not one beat only: it may be replaced by one that was being written.
        (tmp_path / "workers" / "0.new").write_text(json.dumps(vars(next(beats))))
        (tmp_path / "workers" / "0.new").replace(tmp_path / "workers" / "0.json")
        return run.processes[0].poll() is not None

    run.wait_for(ended_at_a_beat)
    run.statuses()
    assert "another process is worker 0 of a job" in run.errors[0]
    assert json.loads((tmp_path / "workers" / "0.json").read_text())["process"] == "other"


def test_it_gives_up_when_the_folder_is_gone(job, tmp_path):
    run = job("wait_for(lambda: False)", workers=1, wait=0.5)
    run.start(0)
    run.wait_for(lambda: run.starts(0))
    # At once: while files are removed one by one, the supervisor writes others.
    (tmp_path / "workers").rename(tmp_path / "gone")
    assert run.statuses() != [0]
    assert "No such file or directory; trying again" in run.errors[0]
    assert "No such file or directory; giving up after" in run.errors[0]


def leading(tmp_path, step=-1):
    """A supervisor of worker 0 of 3 with a clock to set, which waits 100 s."""
    seconds = [1000.0]
    cluster = Cluster(("a:1", "b:1", "c:1"), 0)
    patience = Patience(100, beat=1, lost_after=10)
    supervisor = Supervisor(cluster, tmp_path, [], lambda: step, patience, lambda: seconds[0])
    return supervisor, seconds


def beats(*indices, **fields):
    return {index: Beat(f"p{index}", 1, **fields) for index in indices}


def test_a_failure_is_no_error_of_its_own_if_a_worker_turns_out_to_be_lost(tmp_path):
    """The supervisor of a lost worker cannot say so: it is seen later than what it causes."""
    supervisor, seconds = leading(tmp_path)
    start = Start(1, (0, 1, 2), ("p0", "p1", "p2"), over="failed")
    failed = {**beats(0, 1, start=1, status=2), **beats(2, start=1)}
    supervisor._presence.update(failed)
    supervisor._since = seconds[0]

    def seen(after, *workers):
        """Their next beat is seen some seconds later."""
        seconds[0] += after
        for index in workers:
            failed[index] = dataclasses.replace(failed[index], count=failed[index].count + 1)
        supervisor._presence.update(failed)

    # The last beat of a lost worker may be seen late.
    seen(2, 0, 1, 2)
    assert supervisor._lead(failed, start) == start
    seen(2, 0, 1)
    assert supervisor._lead(failed, start) == start
    # It is lost: the others start again.
    two = {index: failed[index] for index in (0, 1)}
    assert supervisor._lead(two, start).status is None
    # It is not: the error is one of the training.
    seen(1, 0, 1, 2)
    assert supervisor._lead(failed, start).status == 2


def test_nothing_starts_while_a_training_process_runs(tmp_path):
    supervisor, _ = leading(tmp_path)
    start = Start(1, (0, 1, 2), ("p0", "p1", "p2"), over="back")
    there = {**beats(0, 1, start=1), **beats(2, start=1, running=True)}
    assert supervisor._lead(there, start) == start


def test_a_worker_that_is_not_needed_ends_nothing(tmp_path):
    supervisor, _ = leading(tmp_path)
    start = Start(1, (0, 1, 2), ("p0", "p1", "p2"))
    there = {**beats(0, 1, start=1, running=True), **beats(2, start=1, status=0)}
    assert supervisor._lead(there, start) == start


def test_a_worker_that_was_lost_and_is_there_again_is_no_failure(tmp_path):
    """As after a pause that was too long, before the first checkpoint."""
    supervisor, seconds = leading(tmp_path)
    start = Start(1, (0, 1, 2), ("p0", "p1", "p2"), over="lost")
    seconds[0] += 50
    assert supervisor._lead(beats(0, 1, 2, start=1), start) == start  # It is seen in a moment.


def test_training_that_has_ended_although_it_was_not_over_starts_again(tmp_path):
    """A leader that was paused may have replaced the start for a moment."""
    supervisor, _ = leading(tmp_path)
    start = Start(1, (0, 1), ("p0", "p1"))
    there = {**beats(0, start=1, running=True), **beats(1, start=1)}
    assert supervisor._lead(there, start).over == "failed"


def test_training_ends_if_another_leader_has_given_its_number_to_another_start(tmp_path):
    supervisor, _ = leading(tmp_path)
    supervisor._command = [sys.executable, "-c", "import time; time.sleep(30)"]
    supervisor._start_training(Start(2, (0, 1), ("p0", "p1")))
    training = supervisor._training
    try:
        supervisor._follow(Start(2, (0, 1), ("p0", "p1"), step=3))
        assert training.poll() is None
        supervisor._follow(Start(2, (1, 2), ("p1", "p2")))
        assert training.returncode == -signal.SIGTERM
    finally:
        training.kill()
        training.wait()


def test_training_that_lost_a_worker_is_killed_at_once(tmp_path):
    """It cannot save a checkpoint with the others, for which it would wait after SIGTERM."""
    supervisor, _ = leading(tmp_path)
    supervisor._command = [sys.executable, "-c", "import time; time.sleep(30)"]
    start = Start(2, (0, 1), ("p0", "p1"))
    supervisor._start_training(start)
    training = supervisor._training
    try:
        supervisor._follow(dataclasses.replace(start, over="lost"))
        assert training.returncode == -signal.SIGKILL
    finally:
        training.kill()
        training.wait()


def test_only_workers_of_the_last_start_are_waited_for(tmp_path, capsys):
    supervisor, _ = leading(tmp_path)
    of_two = Start(5, (0, 1), ("p0", "p1"), over="failed")
    killed = {**beats(0, start=5, status=-9), **beats(1, start=5, status=1)}
    supervisor._presence.update(killed)
    supervisor._presence.update(
        {index: dataclasses.replace(beat, count=2) for index, beat in killed.items()}
    )
    started = supervisor._lead(killed, of_two)
    assert (started.number, started.workers) == (6, (0, 1))
    of_three = Start(5, (0, 1, 2), ("p0", "p1", "p2"), over="failed")
    assert supervisor._lead(killed, of_three) == of_three
    assert "minutes for worker 2" in capsys.readouterr().err
