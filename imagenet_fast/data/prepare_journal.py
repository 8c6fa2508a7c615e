"""The journal of ``prepare``: what of its job is done, so that a run that was ended goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.manifest import Shard, Skipped

JOURNAL = "prepare.journal"


@dataclasses.dataclass(frozen=True)
class Done:
    """A shard that was made, and what became of the images that were to be in it."""

    split: str
    shard: Shard
    class_counts: list[int]
    converted: dict[str, int]
    skipped: list[Skipped]
    digest: str  # as that of the task
    facts: str = ""  # of the images that are in it, packed; empty: not known
    unindexed: int = 0  # as in the manifest

    @property
    def images(self) -> int:
        """Those of them that are in it, and those that were left out."""
        return self.shard.examples + len(self.skipped)


class Journal:
    """The job and the shards that are done, a line of JSON each; held by one process at a time."""

    def __init__(self, directory: Path, job: dict[str, Any], free: Collection[str] = ()) -> None:
        """Opens the journal in ``directory``, or begins it.

        Args:
          directory: Where.
          job: What is to be done.
          free: Keys of the job in which it may differ from what was begun.

        Raises:
          UserError: The directory cannot be written to or is in use, the journal is of another job,
            or there are shards that no journal tells of.
        """
        self._path = directory / JOURNAL
        self.job = job  # that was begun
        self.done: list[Done] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
        except OSError as error:
            raise UserError(f"{directory}: cannot be written to: {error.strerror}") from error
        try:
            self._lock()
            self._begin(free)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def add(self, done: Done) -> None:
        """Notes a shard that lies under its final name."""
        self._write(dataclasses.asdict(done))

    def remove(self) -> None:
        """Removes the journal, once it isn't needed any more."""
        self._path.unlink()

    def _close(self) -> None:
        # What could not be written is tried once more, and has been told.
        with contextlib.suppress(OSError):
            self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError as error:
            raise UserError(f"{self._path.parent}: another process is preparing it") from error
        except OSError:  # a file system without locks
            return

    def _begin(self, free: Collection[str]) -> None:
        lines = self._read()
        if lines:
            asked = {key: value for key, value in self.job.items() if key not in free}
            check_same_job(lines[0], asked, self._path.parent)
            self.job = lines[0]
            self.done = [_from_json(line) for line in lines[1:]]
        else:
            self._write(self.job)

    def _read(self) -> list[dict[str, Any]]:
        """Returns the whole lines and cuts off one that a kill left unfinished."""
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(self._file.tell() - len(lines.pop()))
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise UserError(
                f"{self._path}: is damaged ({error}); delete {self._path.parent}"
            ) from error

    def _write(self, values: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(values).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error


def read_job(directory: Path) -> dict[str, Any] | None:
    """Returns the job that was begun in a directory and has not ended, if there is one."""
    path = directory / JOURNAL
    if not path.exists():
        return None
    with path.open("rb") as file:
        line = file.readline()
    try:
        return json.loads(line)
    except ValueError:
        return None  # cut short by a kill, or damaged, of which Journal tells


def unwritable(path: Path, error: OSError) -> UserError:
    """Returns what to raise when a file of the directory cannot be written."""
    return UserError(
        f"{path}: cannot be written: {error.strerror}; when that is mended, the same command "
        "goes on"
    )


def _from_json(values: dict[str, Any]) -> Done:
    return Done(
        split=values["split"],
        shard=Shard(**values["shard"]),
        class_counts=values["class_counts"],
        converted=values["converted"],
        skipped=[Skipped(**skipped) for skipped in values["skipped"]],
        digest=values["digest"],
        facts=values.get("facts", ""),
        unindexed=values.get("unindexed", 0),
    )


def check_same_job(there: dict[str, Any], job: dict[str, Any], directory: Path) -> None:
    """Checks that a directory was made, or begun, by the same job.

    Args:
      there: the job that it tells of.
      job: the one asked for.
      directory: where.

    Raises:
      UserError: if they differ, naming in what.
    """
    # What was made before there was a choice does not tell.
    there = {"encoding": "jpeg", "exif": "ignore", **there}
    differences = [
        f"{key} {there.get(key)!r} there, {value!r} asked for"
        for key, value in job.items()
        if there.get(key) != value
    ]
    if differences:
        raise UserError(
            f"{directory}: holds other data, or the same made in another way: "
            f"{'; '.join(differences)}; choose another directory or delete this one"
        )
