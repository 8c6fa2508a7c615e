"""A process of its own for a pipeline, or for one of its stages: asked by lines, answering in JSON.

The first line in is the job, an object that :func:`main` describes; its answer has ``memory``, the
bytes that the process takes before there is a model. A process that lends its devices answers each
further line with its ``peak_memory``. One that trains takes a :class:`Case` as a JSON object a
line, makes its model the first time, takes ``steps`` of training steps, and answers with the
``seconds`` of each, the ``peak_memory`` so far and, of a new model, the ``nodes`` of its graph and
the seconds to trace it and of its first step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from imagenet_fast.base.worker_process import end_with_parent
from imagenet_fast.benchmarks.process_memory import limit_memory, memory
from imagenet_fast.distribute.quiet import import_tensorflow

if TYPE_CHECKING:
    import tf_keras as keras


class Case(NamedTuple):
    """A training step of a pipeline.

    Attributes:
      batch: examples.
      stages: 0: no pipeline, but the blocks as a plain Keras model.
      micro_batches: as of ``GPipe``.
      rematerialize: the same.
      schedule: the same.
    """

    batch: int
    stages: int = 0
    micro_batches: int = 1
    rematerialize: str = "always"
    schedule: str = "unrolled"


class Network(NamedTuple):
    """Equal blocks that follow each other.

    Attributes:
      kind: ``emulated``: each takes its part of ``seconds`` for the batch; ``convolutions``: each
        is a 3x3 convolution with batch norm and ReLU.
      blocks: how many.
      seconds: of a forward pass of all blocks for an example.
      channels: of a convolution.
      image_size: height and width of its inputs, in pixels.
    """

    kind: str
    blocks: int
    seconds: float = 0.0
    channels: int = 0
    image_size: int = 0


def main() -> None:
    """Answers each line of the input.

    The job has ``cores`` that the process may use, empty for all; ``more_memory`` that it may ask
    for once it has come so far as to answer, 0 for any; and either ``port``, at which it lends its
    device, or ``network``; ``devices``, into how many the CPU is split; and ``servers``,
    ``host:port`` of the processes that lend theirs.
    """
    end_with_parent()
    job = json.loads(sys.stdin.readline())
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])
    import_tensorflow()
    answer = _serve(job["port"]) if job.get("port") else _train(job)
    if job["more_memory"]:
        limit_memory(job["more_memory"])
    _tell({"memory": memory("VmRSS")})
    for line in sys.stdin:
        _tell({**answer(json.loads(line)), "peak_memory": memory("VmHWM")})


def _serve(port: int) -> Callable[[Any], dict[str, Any]]:
    from imagenet_fast.pipeline_parallel.placement import start_stage_server

    _for_one_core()
    start_stage_server(port)
    return lambda asked: {}


def _train(job: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import tensorflow as tf

    from imagenet_fast.pipeline_parallel.placement import stage_devices

    network, count = Network(*job["network"]), job["devices"]
    if network.kind == "emulated":
        # Each op that keeps a device busy has a thread of its own.
        tf.config.threading.set_inter_op_parallelism_threads(4 * count)
    elif job["cores"]:
        _for_one_core()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )
    devices = stage_devices(count + len(job["servers"]), job["servers"])
    steps: dict[Case, _Step] = {}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        case = Case(*asked["case"])
        new = {}
        if case not in steps:
            steps[case] = _Step(case, network, devices)
            new = steps[case].first(asked["examples_first"] or case.batch)
        return {**new, "seconds": [steps[case].seconds() for _ in range(asked["steps"])]}

    return answer


class _Step:
    """The training step of a case."""

    def __init__(self, case: Case, network: Network, devices: list[str]) -> None:
        import tensorflow as tf

        self._case = case
        self._model = _model(case, network, devices)
        self._model.compile("sgd", "mse")
        size = [4] if network.kind == "emulated" else [network.image_size] * 2 + [network.channels]
        with tf.device("CPU:0"):
            # Any batch has the same shape for TensorFlow: [None, ...].
            self._inputs = tf.random.stateless_normal([case.batch, *size], seed=(0, 1))
            aims = self._inputs if network.kind == "emulated" else tf.zeros([case.batch, 1])
            self._examples = tf.data.Dataset.from_tensor_slices((self._inputs, aims)).cache()

    def first(self, examples: int) -> dict[str, Any]:
        """Traces it, and takes a step on so many examples."""
        batches = self._batches(examples)
        begin = time.perf_counter()
        if self._case.stages:
            # Otherwise its first step does, in which there is no graph of the whole step.
            self._model.build_on(self._inputs)
        self._step = self._model.make_train_function()
        graph = self._step.get_concrete_function(batches).graph.as_graph_def()
        traced = time.perf_counter()
        float(self._step(batches)["loss"])
        nodes = len(graph.node) + sum(len(own.node_def) for own in graph.library.function)
        return {
            "nodes": nodes,
            "trace_seconds": traced - begin,
            "first_seconds": time.perf_counter() - traced,
        }

    def seconds(self) -> float:
        """Takes a step; returns how long that took."""
        batches = self._batches(self._case.batch)
        begin = time.perf_counter()
        loss = float(self._step(batches)["loss"])
        assert loss == loss, "the loss is not a number"
        return time.perf_counter() - begin

    def _batches(self, examples: int) -> Any:
        return iter(self._examples.take(examples).batch(examples))


def _model(case: Case, network: Network, devices: list[str]) -> keras.Model:
    import tf_keras as keras

    from imagenet_fast.benchmarks.pipeline.emulated_device import EmulatedBlock
    from imagenet_fast.pipeline_parallel.model import GPipe

    if network.kind == "emulated":
        each = network.seconds / network.blocks
        blocks = [
            EmulatedBlock(place * case.stages // network.blocks, each)
            for place in range(network.blocks)
        ]
    else:
        blocks = [_convolution(network.channels) for _ in range(network.blocks)]
        last = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
        blocks[-1] = keras.Sequential([blocks[-1], *last])
    if not case.stages:
        return keras.Sequential(blocks)
    return GPipe(
        blocks,
        devices[: case.stages],
        num_micro_batches=case.micro_batches,
        rematerialize=case.rematerialize,
        schedule=case.schedule,
    )


def _convolution(channels: int) -> keras.Model:
    import tf_keras as keras

    return keras.Sequential(
        [
            keras.layers.Conv2D(channels, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
    )


def _for_one_core() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    # With a single one, sending to another stage would wait for computing.
    tf.config.threading.set_inter_op_parallelism_threads(4)


def _tell(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
