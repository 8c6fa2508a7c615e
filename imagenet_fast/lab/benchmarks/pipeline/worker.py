"""The worker process of the pipeline benchmark: it trains a pipeline, or serves one stage's device.

It answers each line of its input with a line of JSON. The first line is the job, an object that
:func:`main` describes; the answer has ``memory``, the process' bytes before it has a model. A
server answers each further line with its ``peak_memory``. A trainer reads a :class:`Case` from
each further line, builds its model the first time, takes ``steps`` training steps, and answers with
their ``seconds``, its ``peak_memory`` so far and, for a new model, the ``nodes`` of the graph, the
seconds to trace it and those of the first step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from imagenet_fast.base.worker_process import end_with_parent
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.lab.benchmarks.process_memory import limit_memory, memory

if TYPE_CHECKING:
    import keras


class Case(NamedTuple):
    """A training step of a pipeline.

    Attributes:
      batch: examples in a step.
      stages: of the pipeline, two on each device with ``interleaved_1f1b``; 0: a plain Keras model.
      micro_batches: of ``GPipe``.
      rematerialize: of ``GPipe``.
      schedule: of ``GPipe``; ``gpipe-looped`` has a graph with loops, ``gpipe`` an unrolled one.
    """

    batch: int
    stages: int = 0
    micro_batches: int = 1
    rematerialize: str = "always"
    schedule: str = "gpipe"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.stages // 2 if self.schedule == "interleaved_1f1b" else self.stages


class Network(NamedTuple):
    """A sequence of equal blocks.

    Attributes:
      kind: ``emulated``: each block takes an equal part of ``seconds`` per example;
        ``convolutions``: each is a 3x3 convolution with batch norm and ReLU.
      blocks: their number.
      seconds: of one example's forward pass through all blocks.
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

    The job has ``cores`` that the process may use, empty for all; ``more_memory``, the bytes that
    it may allocate after the first answer, 0 for any number; and either ``port``, at which it
    serves its device, or ``network``; ``devices``, the number of logical CPUs; and ``servers``, the
    ``host:port`` of the other stages' servers.
    """
    end_with_parent()
    job = json.loads(sys.stdin.readline())
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])
    import_tensorflow()
    handle = _serve(job["port"]) if job.get("port") else _train(job)
    if job["more_memory"]:
        limit_memory(job["more_memory"])
    _answer({"memory": memory("VmRSS")})
    for line in sys.stdin:
        _answer({**handle(json.loads(line)), "peak_memory": memory("VmHWM")})


def _serve(port: int) -> Callable[[Any], dict[str, Any]]:
    from imagenet_fast.pipeline_parallel.placement import start_stage_server

    _use_one_core()
    start_stage_server(port)
    return lambda request: {}


def _train(job: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import tensorflow as tf

    from imagenet_fast.pipeline_parallel.placement import stage_devices

    network, count = Network(*job["network"]), job["devices"]
    if network.kind == "emulated":
        # Each op that keeps a device busy blocks a thread.
        tf.config.threading.set_inter_op_parallelism_threads(4 * count)
    elif job["cores"]:
        _use_one_core()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )
    devices = stage_devices(count + len(job["servers"]), job["servers"])
    steps: dict[Case, _Step] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        case = Case(*request["case"])
        new = {}
        if case not in steps:
            steps[case] = _Step(case, network, devices)
            new = steps[case].first(request["examples_first"] or case.batch)
        return {**new, "seconds": [steps[case].seconds() for _ in range(request["steps"])]}

    return handle


class _Step:
    """The training step of a case."""

    def __init__(self, case: Case, network: Network, devices: list[str]) -> None:
        import tensorflow as tf

        self._case = case
        self._model = _model(case, network, devices)
        self._model.compile("sgd", "mse")
        size = [4] if network.kind == "emulated" else [network.image_size] * 2 + [network.channels]
        with tf.device("CPU:0"):
            # TensorFlow sees the same shape for any batch: [None, ...].
            self._inputs = tf.random.stateless_normal([case.batch, *size], seed=(0, 1))
            targets = self._inputs if network.kind == "emulated" else tf.zeros([case.batch, 1])
            self._examples = tf.data.Dataset.from_tensor_slices((self._inputs, targets)).cache()

    def first(self, examples: int) -> dict[str, Any]:
        """Traces the step and runs it on the first ``examples``."""
        import tensorflow as tf

        batches = self._batches(examples)
        begin = time.perf_counter()
        if self._case.stages:
            # Otherwise the first step would build it, without a graph of the whole step.
            self._model.build_on(self._inputs)
        # As Keras' train_function, which does not give its graph.
        self._step = tf.function(lambda batches: self._model.train_step(next(batches)))
        graph = self._step.get_concrete_function(batches).graph.as_graph_def()
        traced = time.perf_counter()
        float(self._step(batches)["loss"])
        nodes = len(graph.node) + sum(len(body.node_def) for body in graph.library.function)
        return {
            "nodes": nodes,
            "trace_seconds": traced - begin,
            "first_seconds": time.perf_counter() - traced,
        }

    def seconds(self) -> float:
        """Runs a step and returns its duration."""
        batches = self._batches(self._case.batch)
        begin = time.perf_counter()
        loss = float(self._step(batches)["loss"])
        assert loss == loss, "the loss is not a number"
        return time.perf_counter() - begin

    def _batches(self, examples: int) -> Any:
        return iter(self._examples.take(examples).batch(examples))


def _model(case: Case, network: Network, devices: list[str]) -> keras.Model:
    import keras

    from imagenet_fast.lab.benchmarks.pipeline.emulated_device import EmulatedBlock
    from imagenet_fast.pipeline_parallel.gpipe import GPipe

    if network.kind == "emulated":
        each = network.seconds / network.blocks
        blocks = [
            EmulatedBlock(place * case.stages // network.blocks % max(1, case.devices), each)
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
        devices[: case.devices],
        num_stages=case.stages,
        balance=[network.blocks // case.stages] * case.stages,
        num_micro_batches=case.micro_batches,
        rematerialize=case.rematerialize,
        schedule=case.schedule.removesuffix("-looped"),
        unroll=not case.schedule.endswith("-looped"),
    )


def _convolution(channels: int) -> keras.Model:
    import keras

    return keras.Sequential(
        [
            keras.layers.Conv2D(channels, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
    )


def _use_one_core() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    # With a single thread, sending to another stage would wait for computation.
    tf.config.threading.set_inter_op_parallelism_threads(4)


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
