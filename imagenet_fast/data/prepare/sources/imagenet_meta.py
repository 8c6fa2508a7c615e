"""Reads the class list of ImageNet's development kit by SciPy, in a process of its own.

SciPy's reader ends the process where arrays are nested too deeply. The process is new, not a fork:
a fork waits forever for what other threads, as those of SciPy's libraries, held at that moment.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from imagenet_fast.base.outside import parse_json
from imagenet_fast.base.worker_process import module_command
from imagenet_fast.data.prepare.sources.memory_limit import limited_memory

_MAX_MEMORY = 2**29  # bytes
_SECONDS = 60  # ImageNet's own takes one


def rows_of_meta(data: bytes) -> list[tuple[int, str, str]]:
    """Returns the number, synset and name of each row of ``synsets`` in ``meta.mat``.

    Raises:
      ValueError: if SciPy cannot read it; the message says why.
    """
    try:
        finished = subprocess.run(
            module_command(__name__), input=data, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"reading it takes over {_SECONDS} s") from None
    if finished.returncode < 0:
        name = signal.Signals(-finished.returncode).name
        raise ValueError(f"reading it ends SciPy's process by {name}")
    if finished.returncode:
        last = finished.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError(last[0] if last else f"status {finished.returncode}")
    return parse_json(finished.stdout, list[tuple[int, str, str]])


def _rows(data: bytes) -> Sequence[tuple[int, str, str]]:
    from scipy.io import loadmat

    with limited_memory(_MAX_MEMORY):
        file = loadmat(io.BytesIO(data), squeeze_me=True, variable_names=["synsets"])
    table = file["synsets"]
    columns = [np.atleast_1d(table[name]) for name in ("ILSVRC2012_ID", "WNID", "words")]
    return [(int(number), str(synset), str(words)) for number, synset, words in zip(*columns)]


if __name__ == "__main__":
    try:
        json.dump(_rows(sys.stdin.buffer.read()), sys.stdout)
    except Exception as error:  # SciPy may raise any class for other files
        sys.exit(f"{type(error).__name__}: {error}")
