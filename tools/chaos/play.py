"""Plays faults against one run until it ends."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import launch_local

from chaos.ends import difference, end_of, largest_difference
from chaos.faults import FAULTS, Fault, Scene
from chaos.machine import Clock, Disk, Network
from chaos.worker import Worker, train
from imagenet_fast.base.environment import now

CHECKPOINT_EVERY = 20
_POLL_SECONDS = 0.002
# Without a step, an end or a fault.
_HUNG_SECONDS = 300
# For workers to notice that another one has ended, and then to end on SIGTERM.
_NOTICE_SECONDS = 60
_GRACE_SECONDS = 5
_MOST_FAULTS = 200
# What a worker prints that waits for another one.
_WAITS = "waiting for worker"
_PORT = 2222
_TAIL = 4096
# Of an end, relative; the network's batch norm amplifies the rounding of its sums.
_ROUNDING = 1e-3


class Setting(NamedTuple):
    """How a run is played.

    Attributes:
      workers: their number.
      clock: whether the time of day can be changed, for which processes start anew.
      kinds: of faults.
    """

    workers: int
    clock: bool
    kinds: tuple[str, ...]


class ProblemError(Exception):
    """A run that does not do what it must."""


class Play:
    """One run, in a folder of its own.

    Args:
      folder: for the run, its log and its disk; must not exist.
      data_dir: of the images.
      steps: of the run.
      setting: of the run.
      seed: of the faults; None: there are none.
      is_root: whether the disk can be small, and workers have namespaces.
      played: called after each fault.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        data_dir: pathlib.Path,
        steps: int,
        setting: Setting,
        seed: str | None,
        *,
        is_root: bool,
        played: Callable[[], None] = lambda: None,
    ) -> None:
        folder.mkdir()
        self._folder, self._steps, self._setting, self._played = folder, steps, setting, played
        self._seed = seed
        self._random = random.Random(seed)
        self._log = folder / "output.txt"
        self._log.touch()
        disk = Disk(folder / "disk", mounted=is_root)
        self._scene = Scene(
            disk.folder / "run",
            disk,
            Network(setting.workers) if is_root and setting.workers > 1 else None,
            Clock(folder) if setting.clock else None,
            self._random,
            next_workers=setting.workers,
            most_workers=setting.workers,
        )
        self._arguments = [
            "train",
            "--flagfile=digits",
            "--model=chaos.network:build",
            "--image_size=16",
            "--gpus=0",
            f"--replicas={setting.workers},{setting.workers}",
            f"--duration={steps} steps",
            f"--decay_at={steps // 2} steps",
            "--log_every=1 step",
            "--eval_every=50 steps",
            f"--checkpoint_every={CHECKPOINT_EVERY} steps",
            "--keep_checkpoints=3",
            "--noexamine",
            "--notensorboard",
            f"--data_dir={data_dir}",
            f"--model_dir={self._scene.model_dir}",
        ]
        self._starts = 0
        self._read_from = 0  # of the log: what the processes that run now have written
        self._started = 0.0
        self._rows_file = -1
        self._seen: list[dict[str, Any]] = []  # faults after which no step has been taken yet
        self.rows: list[dict[str, Any]] = []

    def play(self) -> dict[str, Any]:
        """Plays faults until the run has ended; :attr:`rows` then has a row for each.

        Returns:
          Its end.

        Raises:
          ProblemError: if the run does not do what it must.
        """
        self._start()
        while not self._reaches(self._next_moment()):
            if len(self.rows) >= _MOST_FAULTS:
                raise ProblemError(f"the run has not ended after {_MOST_FAULTS} faults")
            running = len(self._scene.workers)
            kinds = [kind for kind in self._setting.kinds if FAULTS[kind].workers <= running]
            kind = self._random.choice(kinds)
            row = {"fault": kind, "time": now(), "step": self._step(), "starts": self._starts}
            self.rows.append(row)
            self._scene.details = row
            try:
                self._play(FAULTS[kind], row)
            except ProblemError as problem:
                row["problem"] = str(problem)
                raise
            self._played()
        return self._end()

    def close(self) -> None:
        """Ends all processes and removes the network; the folder stays."""
        self._stop_all(signal.SIGKILL)
        if self._scene.network is not None:
            self._scene.network.close()

    def keep(self, folder: pathlib.Path) -> None:
        """Copies the run and its output."""
        shutil.copytree(self._folder, folder, dirs_exist_ok=True)

    def remove(self) -> None:
        """Removes the run."""
        self._scene.disk.remove()
        shutil.rmtree(self._folder)

    # --- Processes

    def _start(self) -> None:
        scene, setting = self._scene, self._setting
        self._starts += 1
        self._read_from = self._log.stat().st_size
        environment = dict(scene.clock.environment) if scene.clock else {}
        environment["PYTHONFAULTHANDLER"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        environments = [environment]
        spaces = [""]
        if scene.next_workers > 1:
            environments, spaces = self._cluster(environment)
        # Restored from here, or from a damaged one that can be read.
        self._expected = max([0, *scene.whole_checkpoints()])
        file = scene.model_dir / "metrics.jsonl"
        self._rows_file = file.stat().st_ino if file.exists() else -1
        self._started = time.monotonic()
        scene.workers = [
            Worker(
                train(self._arguments, environment, space, fresh=setting.clock),
                self._log,
            )
            for environment, space in zip(environments, spaces)
        ]

    def _cluster(self, environment: dict[str, str]) -> tuple[list[dict[str, str]], list[str]]:
        """Returns the environments and network namespaces of several workers."""
        workers, network = self._scene.next_workers, self._scene.network
        if network is None:
            ports = launch_local.choose_ports(workers, None)
            return launch_local.worker_environments(ports, environment), [""] * workers
        ports = [_PORT + self._starts] * workers
        environments = launch_local.worker_environments(ports, environment)
        addresses = [f"{host}:{port}" for host, port in zip(network.hosts, ports)]
        for index, own in enumerate(environments):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            own["TF_CONFIG"] = json.dumps(task)
            own["no_proxy"] = own["NO_PROXY"] = ",".join(network.hosts)
        return environments, network.names[:workers]

    def _ended(self) -> list[Worker]:
        return [worker for worker in self._scene.workers if worker.has_ended()]

    def _stop_all(self, number: signal.Signals) -> None:
        for worker in self._scene.workers:
            worker.send(number)
            worker.send(signal.SIGCONT)
        for _ in _until(_GRACE_SECONDS):
            if len(self._ended()) == len(self._scene.workers):
                return
        if number != signal.SIGKILL:
            self._stop_all(signal.SIGKILL)

    # --- Moments

    def _next_moment(self) -> Callable[[], bool]:
        """Returns whether it is time for the next fault."""
        if self._seed is None:
            return lambda: False
        kind = self._random.random()
        if kind < 0.2:
            after = self._random.uniform(0, 4)
            return lambda: time.monotonic() > self._started + after
        if kind < 0.35:
            before = self._files()
            return lambda: self._files() != before
        if kind < 0.45 and self._step() > 0.8 * self._steps:
            return lambda: self._step() >= self._steps
        step = self._step() + self._random.randint(1, 2 * CHECKPOINT_EVERY)
        return lambda: self._step() >= step

    def _files(self) -> set[str]:
        folder = self._scene.checkpoints
        return {file.name for file in folder.iterdir()} if folder.exists() else set()

    def _step(self) -> int:
        """Returns the step of the last row."""
        try:
            with (self._scene.model_dir / "metrics.jsonl").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _TAIL))
                lines = file.read().split(b"\n")[:-1]
            return int(json.loads(lines[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0

    def _resumed(self) -> bool:
        """Returns whether the processes that run now have read the rows and write them."""
        try:
            inode = (self._scene.model_dir / "metrics.jsonl").stat().st_ino
        except OSError:
            return False
        return inode != self._rows_file

    def _reaches(self, moment: Callable[[], bool]) -> bool:
        """Waits for a moment; returns whether the run has ended before.

        Raises:
          ProblemError: if it does not go on.
        """
        last, changed = -1, time.monotonic()
        while True:
            self._look()
            ended = self._ended()
            if ended and any(worker.status for worker in ended):
                # An error that comes late, of a fault before.
                self._ends_all(late=True)
                self._start()
            elif len(ended) == len(self._scene.workers):
                self._settle(self._step())
                return True
            if moment():
                return False
            step = self._step()
            if step != last:
                last, changed = step, time.monotonic()
            if time.monotonic() - changed > _HUNG_SECONDS:
                self._stop_all(signal.SIGABRT)  # They print where they are.
                raise ProblemError(f"no step and no end for {_HUNG_SECONDS} s at step {step}")
            time.sleep(_POLL_SECONDS)

    # --- Faults

    def _play(self, fault: Fault, row: dict[str, Any]) -> None:
        seconds = self._random.uniform(*fault.seconds)
        before = self._step()
        with fault.play(self._scene):
            if fault.ends:
                self._ends_all(late=False)
            else:
                begin = time.monotonic()
                while time.monotonic() < begin + seconds and not self._ended():
                    time.sleep(_POLL_SECONDS)
                row["lasted"] = round(time.monotonic() - begin, 3)
        self._seen.append(
            {"row": row, "healed": time.monotonic(), "step": max(before, self._step())}
        )
        if fault.ends:
            row["outcome"] = "resumed"
            self._start()
        else:
            self._goes_on(row)

    def _goes_on(self, row: dict[str, Any]) -> None:
        """Waits until a run takes steps again, or ends, after a fault that need not end it."""
        step = self._step()
        row["outcome"] = "went on"
        training = self._resumed()
        for _ in _until(_HUNG_SECONDS):
            ended = self._ended()
            if ended and any(worker.status for worker in ended):
                row["outcome"] = "resumed"
                self._ends_all(late=False)
                self._seen[-1]["healed"] = time.monotonic()
                self._seen[-1]["step"] = max(self._seen[-1]["step"], self._step())
                self._start()
                return
            # During the start, the steps that come are looked for later.
            if not training or self._step() > step or len(ended) == len(self._scene.workers):
                return
            if step >= self._steps:
                return
        self._stop_all(signal.SIGABRT)
        raise ProblemError(f"no step for {_HUNG_SECONDS} s after the fault")

    def _ends_all(self, late: bool) -> None:
        """Waits until all workers have ended, at least one of which has, or will at once.

        Raises:
          ProblemError: if one does not notice, or has another end than an error of one line.
        """
        scene, begin = self._scene, time.monotonic()
        row = self.rows[-1] if self.rows else {}
        left: list[int] = []  # that are ended here, as a launcher does
        for _ in _until(_NOTICE_SECONDS):
            if len(self._ended()) == len(scene.workers):
                break
            # TensorFlow waits for workers that have not started; so is one that ended before.
            if _WAITS in self._output():
                row["waited"] = True
                break
        if len(self._ended()) < len(scene.workers):
            left = [n for n, worker in enumerate(scene.workers) if not worker.has_ended()]
            self._stop_all(signal.SIGTERM)
        row["ending"] = round(time.monotonic() - begin, 3)
        row["statuses"] = [worker.status for worker in scene.workers]
        if late:
            row["late"] = True
        wrong = [
            worker.status
            for n, worker in enumerate(scene.workers)
            if worker.status not in (0, 2) and not worker.was_signalled and n not in left
        ]
        if "Traceback" in self._output():
            raise ProblemError("a traceback in the output")
        if wrong:
            raise ProblemError(f"a worker ended with status {wrong[0]}")
        if late and not self.rows:
            raise ProblemError("the run ended without a fault")
        if not row.get("waited") and not all(scene.workers[n].was_signalled for n in left):
            raise ProblemError(f"workers {left} had to be ended after {_NOTICE_SECONDS} s")

    def _output(self) -> str:
        """Returns what the processes that run now have printed."""
        return self._log.read_bytes()[self._read_from :].decode(errors="replace")

    def _look(self) -> None:
        """Notes for the last faults what was lost, once a step has been taken after them."""
        if not self._seen or not self._resumed():
            return
        step = self._step()
        seen = self._seen[0]
        if self._starts == seen["row"]["starts"]:  # It went on.
            if step > seen["step"] or seen["step"] >= self._steps:
                self._settle(seen["step"])
            return
        if "from" not in seen:
            seen["from"] = step
        elif step > seen["from"]:
            self._settle(seen["from"])

    def _settle(self, resumed: int) -> None:
        """Notes that training goes on from a step.

        Raises:
          ProblemError: if more steps are lost than since the last checkpoint.
        """
        for number, seen in enumerate(self._seen):
            seen["row"]["seconds"] = round(time.monotonic() - seen["healed"], 3)
            seen["row"]["lost"] = max(0, seen["step"] - resumed) if number == 0 else 0
        restarted = bool(self._seen) and self._starts != self._seen[0]["row"]["starts"]
        self._seen.clear()
        if restarted:
            self._scene.damaged.clear()  # They have been set aside.
        if restarted and resumed < self._expected:
            raise ProblemError(f"resumed from step {resumed}, not from checkpoint {self._expected}")

    def _end(self) -> dict[str, Any]:
        """Returns the run's end, read by a process of its own, which may start threads."""
        result = self._folder / "end.json"

        def read() -> int:
            result.write_text(json.dumps(end_of(self._scene.model_dir)))
            return 0

        reader = Worker(read, self._log)
        while not reader.has_ended():
            time.sleep(_POLL_SECONDS)
        if reader.status:
            raise ProblemError("the run's end cannot be read")
        return json.loads(result.read_text())


def _until(seconds: float) -> Iterator[None]:
    """Yields every moment for some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(_POLL_SECONDS)


def compare(play: Play, expected: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """Plays a run, and returns its end and what is wrong with it; empty: nothing.

    With another number of workers, sums have another order, and the end another rounding.

    Args:
      play: the run.
      expected: the end of an undisturbed run; None: this is one.
    """
    try:
        end = play.play()
        if expected is None:
            return end, ""
        moved = [row for row in play.rows if row["fault"] == "other_workers"]
        if moved:
            moved[-1]["difference"] = largest_difference(end, expected)
        return end, difference(end, expected, _ROUNDING if moved else 0)
    except ProblemError as problem:
        return None, str(problem)


def kinds_for(names: Sequence[str], workers: int, clock: bool, missing: Sequence[str]) -> list[str]:
    """Returns the kinds of faults that a run can have.

    Args:
      names: those to choose from.
      workers: of the run.
      clock: whether its clock can be changed.
      missing: what this machine lacks.
    """
    return [
        name
        for name in names
        if (fault := FAULTS[name]).needs not in missing
        and max(fault.workers, fault.run_workers) <= workers
        and (fault.needs == "clock") <= clock
    ]
