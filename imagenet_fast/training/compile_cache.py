"""A cache on disk of what XLA compiles: programs for CPUs, the autotuner's choices for GPUs.

With TensorFlow's own cache a damaged file ends the run, as does a full disk, and its keys lack the
CPU and XLA's flags. So TensorFlow gets a private folder of this process. It is filled from the
store, a folder that processes share, with the entries whose checksum holds; new ones are copied
into the store.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator

from imagenet_fast.base.cache_folder import cache_folder, reason_to_distrust
from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.base.environment import cpu_model
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import open_new, temporary_beside, write_file
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.config import Config
from imagenet_fast.distribute.gpus import installed_gpus

# The versions that were tried: 2.15 fails when it saves a program.
_VERSION = "2.21."
# Not GPUs, on which no programs were loaded yet: if one cannot be, TensorFlow ends the run, where
# JAX compiles it. The autotuner's choices are what JAX caches on GPUs by default, too.
_DEVICES_OF_PROGRAMS = "CPU"
# Bytes of the store, of the entries that a process takes from it, newest first, and of the free
# space that is left to others. ResNet-50's training step has 6 MB.
_MOST_IN_STORE, _MOST_TAKEN, _SPARE = 2**31, 2**28, 2**28
_PREFIX, _KEY_PREFIX = "imagenet-fast-xla-", "imagenet_fast_xla-"
_UNFINISHED = ".tmp"  # the suffix of files that TensorFlow is writing
_DIGEST = hashlib.sha256().digest_size


@contextlib.contextmanager
def cache_flags(config: Config) -> Iterator[None]:
    """Has TensorFlow cache what it compiles, if it first lists its devices in this context.

    Later it does not read the flags any more, and the cache stays empty.
    """
    folder = None
    if _is_wanted(config):
        with contextlib.suppress(OSError):  # CompileCache says so
            folder = _private_folder()
    if folder is None:
        yield
        return
    given, of_xla = _given_flags()
    os.environ["TF_XLA_FLAGS"] = (
        f"{given} --tf_xla_persistent_cache_directory={folder} "
        f"--tf_xla_persistent_cache_device_types={_DEVICES_OF_PROGRAMS}"
    )
    if _gpus():  # TensorFlow reads this one when it first compiles
        autotuner = f"--xla_gpu_per_fusion_autotune_cache_dir={folder}"
        os.environ["XLA_FLAGS"] = f"{of_xla} {autotuner}"
    try:
        yield
    finally:
        # Other processes must not write into the folder.
        os.environ["TF_XLA_FLAGS"] = given
        if not given:
            del os.environ["TF_XLA_FLAGS"]


class CompileCache:
    """The cache of a run: takes the store's entries, and gives it new ones.

    If the store, or the private folder, cannot be used, one line says so, and there is none.

    Raises:
      UserError: if ``compile_cache`` is a folder that cannot be made or written, or that others can
        write: the entries are machine code.
    """

    def __init__(self, config: Config) -> None:
        self._store: pathlib.Path | None = None
        is_wanted = _is_wanted(config)
        if not is_wanted and config.compile_cache not in ("auto", "none"):
            warn_once(
                "compile_cache has no effect: it needs TensorFlow 2.21, and TF_XLA_FLAGS without a "
                "cache of their own"
            )
        folder = _folder(config.compile_cache) if is_wanted else None
        if folder is not None:
            self._store = folder / f"{_KEY_PREFIX}{_key(config)}"
            with self._gives_up():
                self._take()

    def save(self) -> None:
        """Copies what was compiled since into the store."""
        if self._store is None:
            return
        with self._gives_up():
            for path in _private_folder().iterdir():
                found, kept = path.lstat(), self._store / path.name
                if not stat.S_ISREG(found.st_mode) or path.suffix == _UNFINISHED:
                    continue
                if not os.path.lexists(kept):
                    _check_space(self._store, found.st_size + _SPARE)
                    content = path.read_bytes()
                    try:
                        write_file(kept, hashlib.sha256(content).digest() + content)
                    except FileNotFoundError:  # To another process it was one of the oldest.
                        if not self._store.is_dir():
                            raise
                elif found.st_atime:  # TensorFlow has read it: see _take
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(kept)
            self._remove_oldest()

    def _take(self) -> None:
        """Copies intact entries into the private folder, and removes damaged ones."""
        private, store = _private_folder(), self._store
        assert store is not None
        with contextlib.suppress(FileExistsError):
            store.mkdir(mode=0o700)
        if not stat.S_ISDIR(store.lstat().st_mode):
            raise OSError(errno.ENOTDIR, "is a link or a file", str(store))
        taken = damaged = 0
        entries = _by_age(store.glob("[!.]*"))
        for found, path in reversed(entries):
            if taken + found.st_size > _MOST_TAKEN:
                break
            taken += found.st_size
            try:
                content = path.read_bytes() if stat.S_ISREG(found.st_mode) else b""
            except FileNotFoundError:  # another process has removed it
                continue
            digest, content = content[:_DIGEST], content[_DIGEST:]
            if hashlib.sha256(content).digest() != digest:
                path.unlink(missing_ok=True)
                damaged += 1
                continue
            copy = private / path.name
            if not copy.exists():
                write_file(copy, content)
                # The first reading sets another time, unless the disk is mounted without.
                os.utime(copy, (0, found.st_mtime))
        if damaged:
            warn_once(f"{store}: removed {damaged} damaged of {len(entries)} compiled programs")

    def _remove_oldest(self) -> None:
        """Removes the entries used least recently, of all machines and versions, to the bound."""
        assert self._store is not None
        entries = _by_age(self._store.parent.glob(f"{_KEY_PREFIX}*/*"))
        total = sum(found.st_size for found, _ in entries)
        for found, path in entries:
            if total <= _MOST_IN_STORE:
                break
            path.unlink(missing_ok=True)
            total -= found.st_size

    @contextlib.contextmanager
    def _gives_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._store = None
            where = f"{error.filename} " if error.filename else ""
            warn_once(f"no more programs of XLA are cached: {where}{error.strerror or error}")


def _by_age(paths: Iterable[pathlib.Path]) -> list[tuple[os.stat_result, pathlib.Path]]:
    """Returns what is no folder, and was not removed meanwhile, least recently used first."""
    entries = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                entries.append((found, path))
    return sorted(entries, key=lambda entry: entry[0].st_mtime)


def _is_wanted(config: Config) -> bool:
    import tensorflow as tf

    if not config.xla or config.compile_cache == "none":
        return False
    own = "tf_xla_persistent_cache_directory" in _given_flags()[0]
    return tf.__version__.startswith(_VERSION) and not own


def _folder(given: str) -> pathlib.Path | None:
    if given == "auto":
        return cache_folder("XLA's programs are")
    folder = to_local_path(given, "compile_cache").absolute().resolve()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        reason = reason_to_distrust(folder)
        if not reason:
            probe = temporary_beside(folder / "writable")
            open_new(probe).close()
            probe.unlink()
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
    if reason:
        raise UserError(f"compile_cache {folder} {reason}; choose another folder, or none")
    return folder


def _key(config: Config) -> str:
    """Returns what distinguishes programs that may not be exchanged, beside TensorFlow's key."""
    import tensorflow as tf

    name, features = cpu_model()
    parts = [tf.__version__, tf.version.GIT_VERSION, platform.machine(), name, *sorted(features)]
    # XLA divides loops by the number of cores.
    parts += [str(cpu_cores()), *_gpus(), *_given_flags(), str(config.deterministic)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _gpus() -> tuple[str, ...]:
    """Returns the models of this machine's GPUs, which have the capability, and the driver's."""
    from imagenet_fast.distribute.cuda import module_version

    try:
        names = installed_gpus()
    except UserError:  # which the strategy raises, too
        names = []
    return (*names, module_version()) if names else ()


@functools.cache
def _given_flags() -> tuple[str, str]:
    """Returns the user's flags of TensorFlow and of XLA, before any are added here."""
    return os.environ.get("TF_XLA_FLAGS", ""), os.environ.get("XLA_FLAGS", "")


@functools.cache
def _private_folder() -> pathlib.Path:
    """Makes the folder that TensorFlow reads and writes; it is removed with the process.

    Raises:
      OSError: if it cannot be made, or if too little space is left to write programs there.
    """
    above = pathlib.Path(tempfile.gettempdir())
    if any(map(str.isspace, str(above))):
        raise OSError(errno.EINVAL, "has white space, which ends a flag of TensorFlow", str(above))
    _remove_abandoned(above)
    _check_space(above, _MOST_TAKEN + _SPARE)
    made = pathlib.Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    # Until the process ends, however it does: a process's number may be another's by then.
    fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = made.rename(made.with_name(made.name[1:]))  # now others may look at the lock
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _remove_abandoned(above: pathlib.Path) -> None:
    """Removes the private folders of this user's processes that were killed."""
    for path in above.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # a link, a pipe, or locked
            opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(opened).st_uid == os.geteuid():
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(opened)


def _check_space(folder: pathlib.Path, size: int) -> None:
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, f"has less than {size:,} bytes of space left", str(folder))
