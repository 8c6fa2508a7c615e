"""Shards that the workers of Apache Beam make, here or on other machines.

Beam only says which worker makes which shard. A worker opens the source anew, writes the shard by
the function that the local processes call, and leaves a file for the process that started it all.
That one collects these files, whatever progress the runner reports, and keeps the journal. So
a shard that is made twice is the same shard, and a worker that dies has made none.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import re
import shlex
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypedDict, Union

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.utils.shared import Shared

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, first_line, nearest
from imagenet_fast.base.files import temporary_beside, write_file
from imagenet_fast.base.outside import parse_json
from imagenet_fast.base.paths import Path, is_local, to_path
from imagenet_fast.data.manifest import Skipped
from imagenet_fast.data.prepare.image_limit import ImageLimit
from imagenet_fast.data.prepare.journal import Done, leave, left_path, read_left
from imagenet_fast.data.prepare.plan import TASKS, Task
from imagenet_fast.data.prepare.shard_maker import ShardMaker
from imagenet_fast.data.prepare.shard_writer import Finish, Release, Writer, use_one_core
from imagenet_fast.data.prepare.sources import ListedFile, Source

_SECONDS_BETWEEN_LOOKS = 1.0  # at the files that workers leave
_SECONDS_BETWEEN_LOOKS_INTO_BUCKETS = 10.0
# After an error of a worker, Beam names the step; from another process, it puts a traceback before.
_OWN_ERROR = re.compile(r"UserError: (.+?) \[while running ")
_QUIET = "--default_sdk_harness_log_level=WARNING"  # of workers, unless another is given
# In the environment of workers that Beam starts on this machine: the process to end with.
_LAUNCHER = "IMAGENET_FAST_BEAM_LAUNCHER"

Opener = Callable[[Union[dict[str, list[ListedFile]], None]], Source]


class _Line(TypedDict):
    """A task in a file: with the images themselves if the source lists them, else with places."""

    split: str
    file: str
    digest: str
    images: list[ListedFile] | None
    places: list[tuple[int, int]]


def parse_options(text: str) -> beam.Pipeline:
    """Returns an empty pipeline with Beam's options, given as on a command line.

    Raises:
      UserError: there is no such option, value or runner, or one needs others.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"pipeline_options are {text!r}: {error}") from None
    for word in words:
        if not word.startswith("--"):
            raise UserError(f"pipeline_options have {word!r}: options are written --name=value")
    reasons = io.StringIO()
    try:
        with contextlib.redirect_stderr(reasons), contextlib.redirect_stdout(reasons):
            known = PipelineOptions([]).get_all_options()
            options = PipelineOptions([_QUIET, *words])
            given = options.get_all_options(retain_unknown_options=True)
    except (SystemExit, ValueError):  # of argparse, also after --help
        found = re.search("error: (.+)", reasons.getvalue())
        reason = found[1] if found else f"{text!r} is not one of Apache Beam's"
        raise UserError(f"pipeline_options: {reason}") from None
    for name in given:
        if name not in known:
            raise UserError(f"pipeline_options: Apache Beam has no --{name}{nearest(name, known)}")
    try:
        return beam.Pipeline(options=options)
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"pipeline_options: {reason}") from None


class BeamWriter(Writer):
    """Writes shards by a pipeline of Beam."""

    def __init__(
        self, maker: ShardMaker, pipeline_options: str, bad_limit: ImageLimit, progress: bool
    ) -> None:
        super().__init__(maker, bad_limit, progress)
        self._pipeline_options = pipeline_options

    def run(self, tasks: list[Task], done: list[Done], finish: Finish, release: Release) -> None:
        """As ``Writer``, but nothing is forked."""
        source, directory = self.maker.source, self.maker.directory
        skipped = [image for shard in done for image in shard.skipped]
        self.check_skipped(skipped)
        if not tasks:
            return
        missing = {task.file: task for task in tasks}
        in_bucket = not is_local(directory)
        pause = _SECONDS_BETWEEN_LOOKS_INTO_BUCKETS if in_bucket else _SECONDS_BETWEEN_LOOKS
        with _tasks_file(source, directory, tasks) as (path, places):
            pipeline = parse_options(self._pipeline_options)
            step = _MakeShard(source.opener(), str(directory), self.maker.job, str(path))
            _ = pipeline | beam.Create(places, reshuffle=True) | "make shards" >> beam.ParDo(step)
            with (
                _running(pipeline) as (thread, errors),
                self.progress_bar(tasks, done) as bar,
            ):
                running = True
                while running:
                    thread.join(pause)  # before looking: nothing comes after it has ended
                    running = thread.is_alive() and not errors
                    for found in _left(directory, missing, look_up=not running):
                        del missing[found.shard.file]
                        finish(found)
                        skipped += found.skipped
                        bar.update(found.images)
                    self.check_skipped(skipped)
        if errors:
            raise _explained(source, errors[0])
        if missing:
            raise UserError(
                f"{source.name}: Apache Beam has ended without {counted(len(missing), 'shard')}: "
                "rerun the command to resume"
            )


@contextlib.contextmanager
def _tasks_file(
    source: Source, directory: Path, tasks: list[Task]
) -> Iterator[tuple[Path, list[tuple[int, int]]]]:
    """Writes a line for each task: all of them may be more than a pipeline can hold.

    Yields:
      Its path, and the offset and the number of bytes of each line. Workers stop once it is gone.
    """
    files, splits = source.list_files(), list(source.splits)
    lines = []
    for task in tasks:
        places: list[tuple[int, int]] = task.places.tolist()
        line = _Line(split=task.split, file=task.file, digest=task.digest, images=None, places=[])
        if files is None:
            line["places"] = places
        else:
            line["images"] = [files[splits[number]][index] for number, index in places]
        lines.append(json.dumps(line).encode() + b"\n")
    ends = np.cumsum([len(line) for line in lines]).tolist()
    path = temporary_beside(directory / TASKS)
    write_file(path, b"".join(lines))
    try:
        yield path, [(end - len(line), len(line)) for end, line in zip(ends, lines)]
    finally:
        path.unlink(missing_ok=True)


def _left(directory: Path, missing: dict[str, Task], look_up: bool) -> Iterator[Done]:
    """Yields what workers have left; with ``look_up`` also what a list of files may lack yet."""
    there: Collection[str] = {path.name for path in directory.glob(left_path(directory, "*").name)}
    for task in list(missing.values()):
        path = left_path(directory, task.file)
        if look_up or path.name in there:
            with contextlib.suppress(FileNotFoundError):
                done = read_left(path)
                if done.digest == task.digest:
                    yield done


@contextlib.contextmanager
def _running(pipeline: beam.Pipeline) -> Iterator[tuple[threading.Thread, list[BaseException]]]:
    """Runs a pipeline, without Beam's messages, and cancels it if the context ends before.

    Yields:
      A thread that runs it, as some runners return from ``run`` only at its end; and the errors of
      the pipeline and of Beam's threads: the local runner does not notice that a process has ended,
      and would wait for it for ever.
    """
    log, hook = logging.getLogger("apache_beam"), threading.excepthook
    level = log.level
    log.setLevel(logging.CRITICAL)
    os.environ[_LAUNCHER] = str(os.getpid())
    errors: list[BaseException] = []
    result: Any = None

    def run() -> None:
        nonlocal result
        try:
            result = pipeline.run()
            result.wait_until_finish()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    threading.excepthook = lambda arguments: errors.append(
        arguments.exc_value or RuntimeError("a thread of Apache Beam ended")
    )
    try:
        yield thread, errors
    finally:
        del os.environ[_LAUNCHER]
        if thread.is_alive():  # after an error; what its threads still say is not heard
            with contextlib.suppress(Exception):  # not all runners can
                result.cancel()
        else:
            threading.excepthook = hook
            log.setLevel(level)


def _explained(source: Source, error: BaseException) -> UserError:
    own = _OWN_ERROR.search(f"{type(error).__name__}: {error}")
    if own:
        return UserError(own[1])
    reason = first_line(error) if isinstance(error, Exception) else type(error).__name__
    return UserError(
        f"{source.name}: Apache Beam has failed, perhaps because a worker was killed ({reason}): "
        "rerun the command to resume"
    )


class _MakeShard(beam.DoFn):  # type: ignore[misc]
    """Makes the shard at each place of a file of ``tasks``, for a job and its directory."""

    def __init__(self, opener: Opener, directory: str, job: dict[str, Any], tasks: str) -> None:
        self._opener = opener
        self._directory = directory
        self._job = job
        self._tasks = tasks
        self._shared = Shared()  # the source, by the threads of a process
        self._images = Metrics.counter("prepare", "images")
        self._bad_images = Metrics.counter("prepare", "bad images")

    def setup(self) -> None:
        """Prepares a worker."""
        warnings.filterwarnings("ignore", module="PIL")  # about metadata that is not used
        launcher = _launcher()
        if launcher:
            _begin_process(self._tasks, launcher)

    def process(self, place: tuple[int, int]) -> None:
        """Makes a shard, given the offset and the number of bytes of its task."""
        directory = to_path(self._directory)
        line = self._read(*place)
        task = Task(line["split"], line["file"], np.array(line["places"], np.int64), line["digest"])
        if line["images"] is None:
            source = self._shared.acquire(lambda: self._opener(None))
        else:
            source = self._opener({task.split: line["images"]})
            places = np.arange(len(line["images"]))
            task = Task(task.split, task.file, np.stack([0 * places, places], 1), task.digest)
        leave(directory, ShardMaker(source, directory, self._job).make(task, self._tell))

    def _read(self, offset: int, size: int) -> _Line:
        path = to_path(self._tasks)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return parse_json(file.read(size), _Line)
        except FileNotFoundError:
            if _launcher():  # Beam would print the error with a traceback, after the command's own
                os._exit(1)
            raise UserError(f"{path}: is gone: the command that started this has ended") from None
        except ValueError as error:
            raise UserError(f"{path}: is damaged ({error}): rerun the command") from None

    def _tell(self, skipped: Skipped | None) -> None:
        self._images.inc()
        if skipped:
            self._bad_images.inc()


def _launcher() -> int | None:
    """Returns the process on this machine that started this one for Beam; None: there is none."""
    launcher = os.environ.get(_LAUNCHER, "")
    return None if launcher in ("", str(os.getpid())) else int(launcher)


@functools.lru_cache
def _begin_process(tasks: str, launcher: int) -> None:
    """Begins a process of a worker on the machine of the one that started it, and ends with it.

    Beam's own processes would wait for ever for one that was killed.
    """
    use_one_core()
    path = to_path(tasks)

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            while path.exists():
                os.kill(launcher, 0)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
