"""TensorFlow Model Garden's LARS, in a process and an environment of its own.

``tf-models-official`` asks for a certain TensorFlow and 27 other packages, so that this package
neither needs nor imports it.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.paths import to_local_path
from imagenet_fast.base.worker_process import Worker, start_worker

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
    python = to_local_path(directory, "model_garden") / "bin" / "python"
    if not python.exists():
        raise UserError(
            f"model_garden={directory!r} is no virtual environment (there is no {python}); make "
            f"one with tools/model_garden.sh {directory}"
        )
    job = {"shapes": list(shapes), "weights": list(weights), "options": options}
    # Isolated: the modules beside the worker's file must not stand for packages.
    command = [str(python), "-I", str(_WORKER)]
    advice = "tools/model_garden.sh DIRECTORY makes an environment in which it works"
    with start_worker(command, job, name="Model Garden's LARS", advice=advice) as worker:
        yield ModelGardenLARS(worker)


class ModelGardenLARS:
    """The optimizer in a process that :func:`start_lars` has started.

    Args:
      worker: ``model_garden_worker.py``.

    Attributes:
      versions: of ``tensorflow`` and ``tf-models-official`` there.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.versions: dict[str, str] = worker.answer

    def update(self) -> tuple[float, float]:
        """Updates all variables once; returns the seconds, by the clock and of CPU time.

        They are taken in that process: the time of the messages is not in them.

        Raises:
          UserError: if the process fails.
        """
        seconds, cpu_seconds = self._worker.ask("go")
        return seconds, cpu_seconds
