"""The worker process that runs Model Garden's LARS.

It runs under the Python of an environment with ``tf-models-official``, without this package. It
answers each line of its input with a line of JSON. The first line is the job, a JSON object with
the arguments of :func:`make_update`; the answer has the packages' versions. Each further line
requests an update; the answer is ``[seconds, CPU seconds]``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answers each line of the input."""
    packages = ("tensorflow", "tf-models-official")
    versions = {package: importlib.metadata.version(package) for package in packages}
    update = make_update(**json.loads(sys.stdin.readline()))
    _answer(versions)
    for _ in sys.stdin:
        start, cpu_start = time.perf_counter(), time.process_time()
        update()
        _answer([time.perf_counter() - start, time.process_time() - cpu_start])


def load_lars() -> type:
    """Imports Model Garden's LARS without its packages, which import many others."""
    distribution = importlib.metadata.distribution("tf-models-official")
    path = str(distribution.locate_file("official/modeling/optimization/lars.py"))
    spec = importlib.util.spec_from_file_location("model_garden_lars", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LARS


def make_update(
    shapes: list[list[int]], weights: list[bool], options: dict[str, Any]
) -> Callable[[], None]:
    """Returns a function that updates variables of these shapes and waits until that is done.

    ``weights`` are whether each has weight decay and a trust ratio.
    """
    import tensorflow as tf  # here: a missing package is reported before this takes seconds

    variables, gradients = [], []
    for index, (shape, weight) in enumerate(zip(shapes, weights)):
        # Model Garden excludes variables by name.
        name = "weight" if weight else "excluded"
        start = tf.random.stateless_normal(shape, (1, index), stddev=0.1)
        variables.append(tf.Variable(start, name=name))
        gradients.append(tf.random.stateless_normal(shape, (0, index), stddev=0.01))
    optimizer = load_lars()(exclude_from_weight_decay=["excluded"], **options)

    @tf.function
    def apply() -> None:
        optimizer.apply_gradients(zip(gradients, variables))

    def update() -> None:
        apply()
        tf.test.experimental.sync_devices()

    return update


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
