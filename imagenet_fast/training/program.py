"""Training or evaluation steps in calls of several, between which alone the host has a say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from imagenet_fast.data.dataset import devices_without_tuners
from imagenet_fast.distribute.exchange import text_of_chief
from imagenet_fast.distribute.strategy import devices_of
from imagenet_fast.distribute.tpu import is_tpu
from imagenet_fast.distribute.workers import workers_of
from imagenet_fast.training.options import RunOptions
from imagenet_fast.training.step.training_step import TrainingStep

_Step = Callable[[Any], Any]
# The number of steps, int32, and the first whose loss is not finite, int64; -1: there is none.
_Result = tuple[tf.Tensor, tf.Tensor]
# Ctrl-C and a preemption wait for a call to end.
_SECONDS = 1.0
# At most this factor more than in the last call: what was read ahead makes its steps fast.
_GROWTH = 8
# Where XLA has no fast kernels for convolutions in loops.
_WITHOUT_LOOPS = ("CPU",)
# Before a loop: no step is done, and none has diverged. The counter is int32, which TensorFlow
# keeps in the host's memory: no step waits for a GPU to tell the host that the loop goes on.
_START = (np.int32(0), np.int64(-1))


class Program:
    """Takes steps of a model, several in a call, as ``options.steps_per_call`` has it.

    Where XLA compiles the whole step and devices make their batches, a call is one XLA program with
    a loop; the number of steps is its argument, so it is compiled once. Everywhere else a call is a
    ``tf.function`` with a loop around the step of all replicas, as Keras' ``steps_per_execution``.
    The weights after a step do not depend on which calls it was in.

    The first call takes a single step, because it compiles.

    Args:
      model: compiled, with its optimizer's slots.
      step: ``model.train_step`` or ``model.test_step``.
      options: of the run.
      batches: all replicas' batches of each step from now on; None: replicas make them from the
        number of the step, ``{"step": ...}``.
      xla: whether XLA compiles the step, or as much of it as it can.
      now: the time in seconds.
    """

    def __init__(
        self,
        model: TrainingStep,
        step: _Step,
        options: RunOptions,
        batches: Any = None,
        *,
        xla: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._strategy = model.distribute_strategy
        self._most = 0 if options.steps_per_call == "auto" else int(options.steps_per_call)
        self._now = now
        self._second = 1  # the steps of a second, in the last call
        self._agreed = 1  # the same for all workers
        self._calls = 0
        self._batches = batches
        on_device = xla and batches is None and _compiles_loops(self._strategy)
        self._call = (_on_device if on_device else _on_host)(self._strategy, step)
        self._iterator: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether there has been a call."""
        return self._calls > 0

    def restart(self) -> None:
        """Begins with the first batch again."""
        self._iterator = None

    def take(self, step: int, end: int) -> tuple[int, int | None]:
        """Takes at least one step, and returns when the devices have finished.

        Args:
          step: steps before.
          end: steps after the last one that may be taken.

        Returns:
          The steps so far, and the first one of these, from 1, whose loss was not finite; None: all
          losses were finite.
        """
        if self._iterator is None and self._batches is not None:
            with devices_without_tuners():
                self._iterator = iter(self._batches)
        most, limit = self._limits(end - step)
        numbers = (tf.constant(step), tf.constant(most), tf.constant(limit, tf.float64))
        start = self._now()
        taken, diverged = (int(number) for number in self._call(self._iterator, *numbers))
        seconds = self._now() - start
        if self.is_compiled:
            steps = round(_SECONDS * taken / max(seconds, 1e-9))
            self._second = max(1, min(steps, _GROWTH * taken))
        self._calls += 1
        return step + taken, None if diverged < 0 else diverged + 1

    def _limits(self, most: int) -> tuple[int, float]:
        """Returns the limits of the next call: steps, and seconds after which no step begins."""
        if not self.is_compiled or most == 1:
            return 1, math.inf
        if self._most:
            return min(self._most, most), math.inf
        if workers_of(self._strategy) is None:
            return min(self._second, most), _SECONDS
        # All workers must have the same loop, and their times differ. Since it takes time itself,
        # they agree before the second, third, fifth, ninth ... call.
        if self._calls & (self._calls - 1) == 0:
            self._agreed = int(text_of_chief(self._strategy, str(self._second)))
        return min(self._agreed, most), math.inf


def _compiles_loops(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether XLA compiles a loop around the step, all-reduces and update included."""
    devices = map(tf.DeviceSpec.from_string, devices_of(strategy))
    one = strategy.num_replicas_in_sync == 1
    return one and not any(device.device_type in _WITHOUT_LOOPS for device in devices)


def _on_device(strategy: tf.distribute.Strategy, step: _Step) -> Callable[..., _Result]:
    """Returns a call that is one XLA program, for a single replica."""

    @tf.function(jit_compile=True, autograph=False)
    def program(first: tf.Tensor, most: tf.Tensor) -> _Result:
        def take(done: tf.Tensor, diverged: tf.Tensor) -> _Result:
            number = tf.cast(first + done, tf.int64)
            loss = step({"step": number})["loss"]
            return done + 1, _first_diverged(diverged, number, loss)

        return tf.while_loop(lambda done, _: done < most, take, _START, parallel_iterations=1)

    @tf.function(autograph=False)
    def call(_: None, first: tf.Tensor, most: tf.Tensor, seconds: tf.Tensor) -> _Result:
        # There is no clock in the program, and no input that it could wait for.
        return strategy.run(program, (first, most))

    return call


def _on_host(strategy: tf.distribute.Strategy, step: _Step) -> Callable[..., _Result]:
    """Returns a call that is a graph, whose loop starts the step of each replica."""
    # A TPU's loop may run on another machine, which would be asked each time. Deterministic graphs
    # have no clock.
    timed = not is_tpu(strategy) and not is_op_determinism_enabled()

    @tf.function(autograph=False)
    def call(iterator: Any, first: tf.Tensor, most: tf.Tensor, seconds: tf.Tensor) -> _Result:
        def take(done: tf.Tensor, diverged: tf.Tensor) -> _Result:
            number = tf.cast(first + done, tf.int64)
            batch = {"step": number} if iterator is None else next(iterator)
            losses = strategy.run(step, (batch,))["loss"]
            # All replicas return the same.
            loss = tf.reshape(strategy.experimental_local_results(losses)[0], [])
            return done + 1, _first_diverged(diverged, number, loss)

        # A comparison on a GPU would wait for all its steps so far.
        with tf.device("CPU:0"):
            start = tf.timestamp() if timed else None

        def is_next(done: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            if start is None:
                return done < most
            with tf.device("CPU:0"):
                return (done < most) & ((tf.timestamp() - start < seconds) | (done < 1))

        return tf.while_loop(is_next, take, _START, parallel_iterations=1)

    return call


def _first_diverged(diverged: tf.Tensor, number: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
    """Returns the first step whose loss is not finite, int64; -1: there is none."""
    return tf.where(tf.math.is_finite(loss) | (diverged >= 0), diverged, number)
