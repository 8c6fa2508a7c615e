"""The journal of ``prepare``: the job and its finished shards, from which a later run resumes.

One process writes it. Workers on other machines leave a file for each shard that they finish, in
which this process finds what it adds to the journal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import pathlib
import re
from collections.abc import Collection, Iterator
from typing import IO, Any

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import LineFile, open_to_append, whole_lines, write_file
from imagenet_fast.base.outside import MAX_JSON, Count, parse_json, read_bounded
from imagenet_fast.base.paths import Path
from imagenet_fast.data.manifest import JOURNAL, Shard, Skipped

_LEFT = ".{}.done"
_LEFT_NAME = re.compile(r"\.[a-z]+-\d{5}-of-\d{5}\.done")


@dataclasses.dataclass(frozen=True)
class Done:
    """A finished shard, and what became of the images that were planned for it."""

    split: str
    shard: Shard
    class_counts: list[Count]
    converted: dict[str, Count]
    skipped: list[Skipped]
    digest: str  # the task's
    metadata: str = ""  # its images', packed; empty: unknown
    unindexed: Count = 0  # as in the manifest

    @property
    def images(self) -> int:
        """Number of images planned for it: those in it and the skipped ones."""
        return self.shard.examples + len(self.skipped)


class Journal:
    """The job and the finished shards, a line of JSON each; locked by one process at a time."""

    def __init__(self, directory: Path, job: dict[str, Any], free: Collection[str] = ()) -> None:
        """Opens the journal in the directory of the shards; creates what does not exist.

        The requested job may differ from the started one in the keys ``free``.

        Raises:
          UserError: the directory is not writable or in use, or the journal is of another job.
        """
        self._path = directory / JOURNAL
        self.job = job  # of the first run
        self.done: list[Done] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # In a bucket nothing is locked: two processes write the same shards twice.
            self._file: IO[bytes] | LineFile = (
                open_to_append(self._path)
                if isinstance(self._path, pathlib.Path)
                else LineFile(self._path, whole_lines(self._path))
            )
        except OSError as error:
            raise UserError(f"{directory}: is not writable: {error.strerror}") from error
        try:
            if not isinstance(self._file, LineFile):
                lock(self._file, f"{directory}: another process is preparing it")
            self._begin(free)
            self._take_left()
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def add(self, done: Done) -> None:
        """Adds a shard that has its final name."""
        self._write(dataclasses.asdict(done))

    def remove(self) -> None:
        """Removes the journal, once the manifest is written."""
        if isinstance(self._file, LineFile):
            self.release()  # which writes its last lines
        self._path.unlink()
        for path in self._left():
            path.unlink()

    def release(self) -> None:
        """Closes the journal, also in a forked process, which would keep it locked."""
        # Closing retries a failed write, which has been reported.
        with contextlib.suppress(OSError):
            self._file.close()

    def _begin(self, free: Collection[str]) -> None:
        lines = self._read()
        if not lines:
            self._write(self.job)
            return
        try:
            started = parse_json(lines[0], dict[str, Any])
            self.done = [parse_json(line, Done) for line in lines[1:]]
        except ValueError as error:
            raise UserError(
                f"{self._path}: is damaged ({error}); delete {self._path.parent}"
            ) from error
        requested = {key: value for key, value in self.job.items() if key not in free}
        check_same_job(started, requested, self._path.parent)
        self.job = started

    def _left(self) -> list[Path]:
        found = self._path.parent.glob(_LEFT.format("*-of-*"))
        return sorted(path for path in found if _LEFT_NAME.fullmatch(path.name))

    def _take_left(self) -> None:
        """Adds what the workers of an earlier run left after it had ended."""
        left = self._left()
        for path in left:
            self.done.append(read_left(path))
            self.add(self.done[-1])
        if isinstance(self._file, LineFile):
            self._file.flush()
        for path in left:
            path.unlink()

    def _read(self) -> list[bytes]:
        """Returns the complete lines, and truncates a last one that a killed run cut short."""
        if isinstance(self._file, LineFile):
            return [line.encode() for line in whole_lines(self._path)]
        self._file.seek(0)
        lines = []
        while line := self._file.readline(MAX_JSON + 1):
            lines.append(line)
            if len(line) > MAX_JSON:
                raise UserError(f"{self._path}: has a line of over {MAX_JSON:,} bytes; delete it")
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(self._file.tell() - len(lines.pop()))
        return lines

    def _write(self, values: dict[str, Any]) -> None:
        with writing(self._path):
            if isinstance(self._file, LineFile):
                self._file.add(json.dumps(values))
                return
            self._file.write(json.dumps(values).encode() + b"\n")
            self._file.flush()


def left_path(directory: Path, shard: str) -> Path:
    """Returns the path of the file that a worker elsewhere leaves for a finished shard."""
    return directory / _LEFT.format(shard)


def leave(directory: Path, done: Done) -> None:
    """Leaves a file for a shard that has its final name, for the process with the journal.

    Raises:
      UserError: it cannot be written.
    """
    path = left_path(directory, done.shard.file)
    with writing(path):
        write_file(path, json.dumps(dataclasses.asdict(done)))


def read_left(path: Path) -> Done:
    """Returns what a worker left.

    Raises:
      OSError: there is no such file, or it cannot be read.
      UserError: it is not by a worker.
    """
    try:
        return parse_json(read_bounded(path, MAX_JSON), Done)
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error}); delete it") from error


def lock(file: IO[bytes], message: str) -> None:
    """Locks a file until it is closed or the process ends, where the file system has locks.

    Raises:
      UserError: another process has locked it; with ``message``.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(message) from error
    except OSError:  # a file system without locks
        return


def read_job(directory: Path) -> dict[str, Any] | None:
    """Returns the unfinished job of a directory, or None."""
    path = directory / JOURNAL
    if not path.is_file():
        return None
    with path.open("rb") as file:
        line = file.readline(MAX_JSON)
    try:
        return parse_json(line, dict[str, Any])
    except ValueError:
        return None  # incomplete or damaged, which Journal reports


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes an error in the context, where a file of the directory is written, a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; once that is fixed, rerun the command "
            "to resume"
        ) from error


def check_same_job(existing: dict[str, Any], job: dict[str, Any], directory: Path) -> None:
    """Checks that the job in a directory's manifest or journal is the requested one.

    Raises:
      UserError: if they differ; the message names the differences.
    """
    # Older versions, without these options, did not record them.
    earlier = {"encoding": "jpeg", "exif": "ignore", "pad_to": job.get("pad_to")}
    existing = {**earlier, **existing}
    differences = [
        f"{key} {existing.get(key)!r} there, {value!r} requested"
        for key, value in job.items()
        if existing.get(key) != value
    ]
    if differences:
        raise UserError(
            f"{directory}: holds other data, or the same prepared with other options: "
            f"{'; '.join(differences)}; choose another directory or delete this one"
        )
