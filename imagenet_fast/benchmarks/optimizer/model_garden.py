"""TensorFlow Model Garden's LARS, in a separate process and virtual environment.

``tf-models-official`` requires a certain TensorFlow version and 27 other packages, so this package
does not depend on it.
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
    """Runs a process with variables and Model Garden's LARS while the context is open.

    Args:
      directory: a virtual environment with ``tf-models-official``, TensorFlow and tf_keras, made
        by ``tools/model_garden.sh``.
      shapes: of the variables.
      weights: whether each variable has weight decay and a trust ratio.
      options: other arguments of Model Garden's LARS.

    Raises:
      UserError: if a package is missing in the environment.
    """
    python = to_local_path(directory, "model_garden") / "bin" / "python"
    if not python.exists():
        raise UserError(
            f"model_garden={directory!r} is not a virtual environment (there is no {python}); "
            f"create one with tools/model_garden.sh {directory}"
        )
    job = {"shapes": list(shapes), "weights": list(weights), "options": options}
    # -I: modules beside the worker's file must not shadow packages.
    command = [str(python), "-I", str(_WORKER)]
    advice = "tools/model_garden.sh DIRECTORY creates a working environment"
    with start_worker(command, job, name="Model Garden's LARS", advice=advice) as worker:
        yield ModelGardenLARS(worker)


class ModelGardenLARS:
    """The optimizer in a process started by :func:`start_lars`.

    Args:
      worker: ``model_garden_worker.py``.

    Attributes:
      versions: of that process' ``tensorflow`` and ``tf-models-official``.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.versions: dict[str, str] = worker.answer

    def update(self) -> tuple[float, float]:
        """Updates all variables once; returns the wall-clock and CPU seconds.

        The process measures them itself, without the time of the messages.

        Raises:
          UserError: if the process fails.
        """
        seconds, cpu_seconds = self._worker.ask("go")
        return seconds, cpu_seconds
