"""One reader under atheris, in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import random
import resource
import struct
import sys
import time
import traceback
from typing import NoReturn

import atheris

# The instrumentation prints each module's name.
with (
    contextlib.redirect_stderr(io.StringIO()),
    atheris.instrument_imports(include=["imagenet_fast"]),
):
    import targets

from imagenet_fast.base.errors import UserError


def fuzz(
    reader: str, empty: pathlib.Path, megabytes_above: int, cpu_seconds: float, options: list[str]
) -> NoReturn:
    """Writes the first files, reads them, fuzzes, and ends this process.

    Before it fuzzes, it prints ``first_mb`` and the memory that its first files took, in MB.

    Args:
      reader: a key of ``TARGETS``.
      empty: a folder, which gets files.
      megabytes_above: limit of memory, above what the first files took.
      cpu_seconds: limit of the CPU time of an input. It holds beside other processes, too.
      options: of libFuzzer.
    """
    try:
        _fuzz(reader, empty, megabytes_above, cpu_seconds, options)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _fuzz(
    reader: str, empty: pathlib.Path, megabytes_above: int, cpu_seconds: float, options: list[str]
) -> None:
    make, read, mutate = targets.TARGETS[reader]
    corpus, folder = empty / "corpus", empty / "read"
    corpus.mkdir()
    folder.mkdir()

    def one_input(data: bytes) -> None:
        start = time.process_time()
        try:
            read(folder, data)
        except UserError:
            pass
        except OSError as error:
            if not error.filename:
                raise
        took = time.process_time() - start
        if took > cpu_seconds:
            raise RuntimeError(f"an input took {took:.1f} s of CPU time")

    for number, content in enumerate(make(folder)):
        (corpus / str(number)).write_bytes(content)
        one_input(content)
    first_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print("first_mb", first_mb, flush=True)
    limit = f"-rss_limit_mb={first_mb + megabytes_above}"

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        numbers = random.Random(seed)
        if mutate is not None and numbers.random() < 0.5:
            try:
                return mutate(data, numbers)[:max_size]
            except (ValueError, RecursionError, struct.error):  # no longer of the format
                pass
        return atheris.Mutate(data, max_size)

    arguments = [sys.argv[0], *options, limit, str(corpus)]
    atheris.Setup(arguments, one_input, custom_mutator=change)
    atheris.Fuzz()
