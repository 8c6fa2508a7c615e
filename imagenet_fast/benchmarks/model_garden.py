"""TensorFlow Model Garden's LARS, in a process and an environment of its own.

``tf-models-official`` asks for a certain TensorFlow and 27 other packages, so that this package
neither needs nor imports it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

from imagenet_fast.errors import UserError

_WORKER = pathlib.Path(__file__).with_name("model_garden_worker.py")


@contextlib.contextmanager
def start_lars(
    directory: str,
    shapes: Sequence[Sequence[int]],
    weights: Sequence[bool],
    options: dict[str, Any],
) -> Iterator[ModelGardenLARS]:
    """Starts a process with variables and Model Garden's LARS, and ends it at the end.

    Args:
      directory: a virtual environment with ``tf-models-official``, TensorFlow and tf_keras, as
        ``tools/model_garden.sh`` makes it.
      shapes: of the variables.
      weights: for each of them, whether it is decayed and its rate scaled.
      options: other arguments of Model Garden's LARS.

    Raises:
      UserError: if the environment does not have what is needed.
    """
    python = pathlib.Path(directory, "bin", "python")
    if not python.exists():
        raise UserError(
            f"model_garden={directory!r} is no virtual environment (there is no {python}); make "
            f"one with tools/model_garden.sh {directory}"
        )
    job = {"shapes": list(shapes), "weights": list(weights), "options": options}
    # TensorFlow's remarks are shown only if it fails.
    with tempfile.TemporaryFile("w+") as remarks:
        process = subprocess.Popen(
            # Isolated: the modules beside the worker's file must not stand for packages.
            [str(python), "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=remarks,
            text=True,
        )
        try:
            yield ModelGardenLARS(process, remarks, json.dumps(job))
        finally:
            process.kill()
            # Also closes the pipes.
            process.communicate()


class ModelGardenLARS:
    """The optimizer in a process that :func:`start_lars` has started.

    Args:
      process: of ``model_garden_worker.py``.
      remarks: the file that its errors go to.
      job: the first line for it.

    Attributes:
      versions: of ``tensorflow`` and ``tf-models-official`` there.

    Raises:
      UserError: if the process fails.
    """

    def __init__(self, process: subprocess.Popen[str], remarks: IO[str], job: str) -> None:
        self._process = process
        self._remarks = remarks
        self.versions: dict[str, str] = self._ask(job)

    def update(self) -> tuple[float, float]:
        """Updates all variables once; returns the seconds, by the clock and of CPU time.

        They are taken in that process: the time of the messages is not in them.

        Raises:
          UserError: if the process fails.
        """
        seconds, cpu_seconds = self._ask("go")
        return seconds, cpu_seconds

    def _ask(self, message: str) -> Any:
        try:
            print(message, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._remarks.seek(0)
            *_, reason = ["no reason told", *self._remarks.read().strip().splitlines()]
            raise UserError(
                f"Model Garden's LARS failed under {self._process.args[0]}: {reason}; "
                "tools/model_garden.sh DIRECTORY makes an environment in which it works"
            )
        return json.loads(answer)
