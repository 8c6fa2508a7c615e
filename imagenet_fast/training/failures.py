"""Turns TensorFlow's errors during a run into ``UserError``."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from imagenet_fast.base.addresses import unreachable
from imagenet_fast.base.errors import UserError, first_line
from imagenet_fast.base.paths import bucket_error, is_local
from imagenet_fast.config import Config
from imagenet_fast.distribute.cluster import Cluster

# TensorFlow's message about a UserError raised inside a dataset, by Python or an assertion.
_USER_ERROR = re.compile(
    r"UserError: (.*?)(?:\s*Traceback \(most recent call last\)|\]\n)", re.DOTALL
)
# Its message about a damaged or missing shard: path and reason.
_SHARD = re.compile(r".*(?:FlatMap:|\}\}) (.+); (.+)\n.*\{\{node ReadFile\}\}")
# The message of its Google Cloud Storage client: the reason, then the path.
_BUCKET = re.compile(r"executing an HTTP request: .*(gs://\S+)", re.DOTALL)
# Words that only errors of devices, drivers and their libraries contain, and the types of these.
_DEVICE = re.compile(
    r"cu(DNN|BLAS|FFT|SOLVER|SPARSE)\b|CUDA|\bDNN library|NCCL|Autotun", re.IGNORECASE
)
_DEVICE_ERRORS = (
    tf.errors.InternalError,
    tf.errors.UnknownError,
    tf.errors.UnimplementedError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
)
# Of a program that could not be written: see compile_cache.py.
_FULL_CACHE = re.compile(r"xla_compile_cache.*No space left", re.DOTALL)
_OUT_OF_MEMORY = re.compile(r".*(?:\bOOM\b|out of memory|failed to allocate).*", re.IGNORECASE)
_LOST_WORKER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
# Of workers between which the network has failed; only their errors have these words.
_LOST_NETWORK = re.compile(r"CoordinationService|Collective ops is aborted")
# Of a full disk, a file that may not be larger, or missing permissions.
_UNWRITABLE = (
    OSError,
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.PermissionDeniedError,
    tf.errors.NotFoundError,
    tf.errors.UnknownError,
)


@contextlib.contextmanager
def writing(what: str, path: str, then: str) -> Iterator[None]:
    """Turns TensorFlow's errors of writing to a disk into :class:`UserError`.

    Those of buckets pass: :func:`errors_explained` explains them.

    ``what`` is written to ``path``, and ``then`` is what the same command does after the fix.

    Raises:
      UserError: if it cannot be written, as to a full disk.
    """
    try:
        yield
    except _UNWRITABLE as error:
        if not is_local(path):
            raise
        # TensorFlow's reason follows the names of a temporary file and an operation.
        reason = first_line(error).rpartition("; ")[2][-200:]
        raise UserError(
            f"{what} {path} cannot be written ({reason}); after fixing that, the same command "
            f"{then}"
        ) from error


@contextlib.contextmanager
def errors_explained(then: str, stage_servers: Sequence[str] = ()) -> Iterator[None]:
    """Turns TensorFlow's errors that a user can fix into :class:`UserError`.

    These are a ``UserError`` raised in a dataset, and errors of shards, buckets, devices and other
    workers. All other errors pass.

    Args:
      then: what the same command does after the fix, e.g. ``evaluates again``.
      stage_servers: addresses of the pipeline's stage servers.

    Raises:
      UserError: for such an error.
    """
    try:
        yield
    except tf.errors.OpError as error:
        reason = _reading_error(error)
        if reason:
            raise UserError(f"{reason}; after fixing that, the same command {then}") from error
        if _FULL_CACHE.search(error.message):
            raise UserError(
                "no space is left in the temporary folder, where TensorFlow keeps what XLA "
                f"compiles; with more space, or --compile_cache=none, the same command {then}"
            ) from error
        if isinstance(error, _DEVICE_ERRORS) and _DEVICE.search(error.message):
            raise UserError(
                f"{first_line(error)} ({type(error).__name__}); `imagenet-fast doctor` checks the "
                "devices of this machine"
            ) from error
        if not isinstance(error, _LOST_WORKER) and not _LOST_NETWORK.search(error.message):
            raise
        if stage_servers:
            raise UserError(
                f"{_lost_server(str(error), stage_servers)} has stopped or is unreachable "
                f"({type(error).__name__}); when it runs again, the same command {then}"
            ) from error
        raise UserError(
            f"{_lost_worker(str(error))} has stopped or is unreachable, and without it this one "
            f"cannot continue ({type(error).__name__}); see its output, then start all workers "
            f"again: the same command {then}"
        ) from error


@contextlib.contextmanager
def memory_explained(config: Config, images: int, selected: int) -> Iterator[None]:
    """Turns the error of a device without enough memory into one that says how to need less.

    A replica has ``images`` in a step, and trains on those ``selected``.

    Raises:
      UserError: for such an error.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        found = _OUT_OF_MEMORY.search(error.message)
        if not found:
            raise
        raise UserError(
            f"a device has run out of memory ({found[0].strip()[:200]}): "
            + " or ".join(_ways_to_save_memory(config, images, selected))
        ) from error


def _ways_to_save_memory(config: Config, images: int, selected: int) -> list[str]:
    ways = []
    if config.rematerialize != "always":
        ways.append("give --rematerialize=always, for the same in up to a third more time,")
    least = 2 if config.mixup_alpha or config.cutmix_alpha else 1
    more = range(2 * config.accumulation_steps, selected // least + 1)
    divided = math.gcd(images, selected)
    parts = next((count for count in more if divided % count == 0), None)
    if parts is not None:
        ways.append(
            f"begin a new run with --accumulation_steps={parts}, for {images // parts} instead of "
            f"{images // config.accumulation_steps} of a replica's images at a time (a network "
            "without batch norm and random layers resumes with it)"
        )
    return ways or ["use smaller images, a smaller network or more devices"]


def _reading_error(error: tf.errors.OpError) -> str:
    """Returns what the user can fix in the data or a bucket; empty if the error is another."""
    user_error = _USER_ERROR.search(error.message)
    if user_error:
        return user_error[1]
    shard = _SHARD.search(error.message)
    if shard:
        return f"{shard[1]}: cannot be read: {shard[2]}"
    bucket = _BUCKET.search(error.message)
    return str(bucket_error(bucket[1], error)) if bucket else ""


def _lost_server(error: str, servers: Sequence[str]) -> str:
    """Returns which stage server an error is about, if it can be found."""
    named = re.search(r"/job:stage/replica:0/task:(\d+)", error)
    lost = [servers[int(named[1])]] if named else list(filter(unreachable, servers))
    if not lost and len(servers) > 1:
        return f"one of the stage servers {', '.join(servers)}"
    return f"stage server {', '.join(lost or servers)}"


def _lost_worker(error: str) -> str:
    """Returns which worker an error is about.

    Workers forward each other's errors: the last one named is the first that failed.
    """
    tasks = re.findall(r"/job:worker/replica:0/task:(\d+)", error)
    cluster = Cluster.from_environment()
    if not tasks or cluster is None or int(tasks[-1]) == cluster.index:
        return "another worker"
    return f"worker {tasks[-1]} ({cluster.workers[int(tasks[-1])]})"
