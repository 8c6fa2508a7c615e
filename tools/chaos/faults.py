"""The faults, by name."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from chaos.machine import Clock, Disk, Network
from chaos.worker import Worker

_INDEX = re.compile(r"ckpt-(\d+)\.index")
_RECORDED = re.compile(r'^model_checkpoint_path: "ckpt-(\d+)"', re.MULTILINE)


@dataclasses.dataclass
class Scene:
    """What a fault can happen to.

    Attributes:
      model_dir: of the run.
      disk: that has ``model_dir``.
      network: between workers; None: none.
      clock: of workers; None: the machine's.
      random: numbers that decide how a fault is.
      workers: that run.
      next_workers: their number at the next start.
      most_workers: with which the run begins.
      damaged: steps of checkpoints that faults have damaged.
      details: how the fault is, for the log.
    """

    model_dir: pathlib.Path
    disk: Disk
    network: Network | None
    clock: Clock | None
    random: random.Random
    workers: Sequence[Worker] = ()
    next_workers: int = 1
    most_workers: int = 1
    damaged: set[int] = dataclasses.field(default_factory=set)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def checkpoints(self) -> pathlib.Path:
        """The folder of checkpoints."""
        return self.model_dir / "checkpoints"

    def whole_checkpoints(self) -> list[int]:
        """Returns the steps of finished checkpoints that no fault has damaged, ascending."""
        record = self.checkpoints / "checkpoint"
        recorded = _RECORDED.search(record.read_text()) if record.exists() else None
        if recorded is None:
            return []
        matches = map(_INDEX.fullmatch, (file.name for file in self.checkpoints.iterdir()))
        steps = {int(match[1]) for match in matches if match} - self.damaged
        return sorted(step for step in steps if step <= int(recorded[1]))

    def signal(self, workers: Sequence[Worker], number: signal.Signals) -> None:
        """Ends workers."""
        for worker in workers:
            worker.was_signalled = True
            worker.send(number)

    def choose_worker(self) -> Worker:
        """Returns one, and notes which."""
        place = self.random.randrange(len(self.workers))
        self.details["worker"] = place
        return self.workers[place]


# Does it when the context begins, and undoes it at its end.
_Play = Callable[[Scene], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
      play: does it.
      ends: whether it always ends processes; others may.
      seconds: the shortest and longest time that it lasts.
      needs: ``disk``, ``network``, ``clock`` or nothing.
      workers: that it needs.
      run_workers: with which a run must begin.
    """

    play: _Play
    ends: bool = False
    seconds: tuple[float, float] = (0, 0)
    needs: str = ""
    workers: int = 1
    run_workers: int = 1


@contextlib.contextmanager
def _kill_one(scene: Scene) -> Iterator[None]:
    scene.signal([scene.choose_worker()], signal.SIGKILL)
    yield


@contextlib.contextmanager
def _kill_all(scene: Scene) -> Iterator[None]:
    scene.signal(scene.workers, signal.SIGKILL)
    yield


@contextlib.contextmanager
def _other_workers(scene: Scene) -> Iterator[None]:
    """Kills all; the run resumes with another number of workers."""
    with _kill_all(scene):
        yield
    others = [n + 1 for n in range(scene.most_workers) if n + 1 != len(scene.workers)]
    scene.next_workers = scene.details["next workers"] = scene.random.choice(others)


@contextlib.contextmanager
def _terminate_one(scene: Scene) -> Iterator[None]:
    scene.signal([scene.choose_worker()], signal.SIGTERM)
    yield


@contextlib.contextmanager
def _terminate_all(scene: Scene) -> Iterator[None]:
    scene.signal(scene.workers, signal.SIGTERM)
    yield


@contextlib.contextmanager
def _stop(scene: Scene) -> Iterator[None]:
    worker = scene.choose_worker()
    worker.send(signal.SIGSTOP)
    yield
    worker.send(signal.SIGCONT)


@contextlib.contextmanager
def _disk_full(scene: Scene) -> Iterator[None]:
    scene.disk.fill()
    yield
    scene.disk.free()


@contextlib.contextmanager
def _read_only(scene: Scene) -> Iterator[None]:
    scene.disk.forbid_writing()
    yield
    scene.disk.allow_writing()


@contextlib.contextmanager
def _partition(scene: Scene) -> Iterator[None]:
    assert scene.network is not None
    scene.network.part()
    yield
    scene.network.join()


@contextlib.contextmanager
def _clock(scene: Scene) -> Iterator[None]:
    assert scene.clock is not None
    jump = scene.random.choice((-1, 1)) * scene.random.choice((1, 60, 3600, 86400, 31536000))
    scene.details["jump"] = jump
    scene.clock.set(jump)
    yield


@contextlib.contextmanager
def _damaged_checkpoint(scene: Scene) -> Iterator[None]:
    """Kills all, and damages the newest checkpoint, unless it is the only one."""
    with _kill_all(scene):
        yield
    whole = scene.whole_checkpoints()
    if len(whole) < 2:
        scene.details["damage"] = "none, there is no other checkpoint"
        return
    files = sorted(scene.checkpoints.glob(f"ckpt-{whole[-1]}.*"))
    file = scene.random.choice(files)
    content = bytearray(file.read_bytes())
    place = scene.random.randrange(len(content))
    damage = scene.random.choice(("removed", "empty", "cut", "changed"))
    if damage == "removed":
        file.unlink()
    else:
        if damage == "changed":
            content[place] ^= 1 << scene.random.randrange(8)
        else:
            content = content[: place if damage == "cut" else 0]
        file.write_bytes(content)
    scene.details["damage"] = f"{file.name} {damage}"
    scene.damaged.add(whole[-1])


@contextlib.contextmanager
def _half_written(scene: Scene) -> Iterator[None]:
    """Kills all, and leaves what a process or machine that ends while it writes may leave."""
    with _kill_all(scene):
        yield
    newer = max([0, *scene.whole_checkpoints()]) + 1000
    part = scene.random.randbytes(scene.random.randrange(1, 10000))
    scene.checkpoints.mkdir(parents=True, exist_ok=True)
    kind = scene.random.choice(("temporary", "data", "record", "row", "summary"))
    if kind == "temporary":
        folder = scene.checkpoints / f"ckpt-{newer}_temp"
        folder.mkdir(exist_ok=True)
        (folder / "part-00000-of-00001.data-00000-of-00001").write_bytes(part)
    elif kind == "data":
        (scene.checkpoints / f"ckpt-{newer}.data-00000-of-00001").write_bytes(part)
    elif kind == "record":
        (scene.checkpoints / f"checkpoint.tmp{part[:4].hex()}").write_bytes(part)
    elif kind == "row":
        with (scene.model_dir / "metrics.jsonl").open("ab") as file:
            file.write(b'{"kind": "train", "step": 12')
    else:
        (scene.model_dir / ".summary.json.0123456789ab.tmp").write_bytes(part)
    scene.details["half written"] = kind


FAULTS = {
    "kill_one": Fault(_kill_one, ends=True, workers=2),
    "kill_all": Fault(_kill_all, ends=True),
    "other_workers": Fault(_other_workers, ends=True, run_workers=2),
    "terminate_one": Fault(_terminate_one, ends=True, workers=2),
    "terminate_all": Fault(_terminate_all, ends=True),
    "stop": Fault(_stop, seconds=(0.2, 4)),
    "disk_full": Fault(_disk_full, seconds=(0.05, 4), needs="disk"),
    "read_only": Fault(_read_only, seconds=(0.05, 4), needs="disk"),
    "partition": Fault(_partition, seconds=(0.2, 6), needs="network", workers=2),
    "clock": Fault(_clock, needs="clock"),
    "damaged_checkpoint": Fault(_damaged_checkpoint, ends=True),
    "half_written": Fault(_half_written, ends=True),
}
