"""GPipe: a Keras model whose blocks are computed on several devices, micro-batch by micro-batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.base.keras_2 import layers_in
from imagenet_fast.base.notices import warn_once
from imagenet_fast.models.blocks import check_functional, clone
from imagenet_fast.models.graph import is_functional
from imagenet_fast.pipeline_parallel.balance import balance_for
from imagenet_fast.pipeline_parallel.in_stages import build_in_stages
from imagenet_fast.pipeline_parallel.losses import CompiledLoss, Targets, check_splits
from imagenet_fast.pipeline_parallel.options import REMATERIALIZE
from imagenet_fast.pipeline_parallel.partition import bounds
from imagenet_fast.pipeline_parallel.pipeline import (
    Pipeline,
    positive,
    refuse_tf_keras,
    require_keras_3,
    require_number,
    without_batch_size,
)
from imagenet_fast.pipeline_parallel.placement import stage_devices
from imagenet_fast.pipeline_parallel.schedules import canonical_schedule

# Examples in a micro-batch for counting FLOPs, where the batch size is unknown.
_EXAMPLES = 32
# Micro-batches of a batch, at most, where its size is unknown: more do not change the balance.
_MICRO_BATCHES = 64


@keras.saving.register_keras_serializable("imagenet_fast")
class GPipe(keras.Model):
    """A sequence of blocks, cut into stages on devices of their own (Huang et al. 2018).

    In training, a batch is split into micro-batches that follow each other through the stages, so
    that all devices work at the same time. The gradients are those of the whole batch, for any
    number of stages and micro-batches. Batch norm normalizes each micro-batch by its own
    statistics, and updates its moving averages once per batch. A batch of fewer examples than
    micro-batches has one micro-batch per example. ``evaluate`` and ``predict`` go through the
    stages in micro-batches, too; a call of the model computes all examples at once.

    With ``gpipe``, ``compile`` takes any loss, as for any Keras model: it is computed once, for the
    whole batch. The other schedules, whose backward passes begin before the batch is complete, take
    means and sums over the examples. Losses that a block adds with ``add_loss`` are averaged over
    the batch, as Keras' activity regularizers are.

    Weights are saved by blocks, not stages: any other ``balance`` can load them. A model from a
    ``.keras`` file, ``clone_model`` or ``from_config`` has all blocks on one device. What
    ``export`` writes has no pipeline: it predicts.

    Random numbers of Keras' layers differ by micro-batch and batch.

    Args:
      blocks: Keras layers or models, each of one argument, a tensor or a structure of tensors,
        which the block before it returns. A list in place of a block is a ``keras.Sequential``,
        and a ``keras.Sequential`` in place of the list stands for its layers. Not built yet, or
        built on the device of their stage. Or a functional model of one input and one output,
        which is cut wherever a single layer's outputs pass, and whose weights are copied to the
        stages; or a function that returns such a model, whose weights are then made there.
      devices: names of devices, in order; stage k is on device k % len(devices). None: one GPU or,
        without any, CPU for each stage; all for ``interleaved_1f1b``.
      num_stages: number of stages; None: one for each device. For ``interleaved_1f1b`` a multiple
        of the number of devices.
      balance: number of blocks of each stage; None: the one with the least work of the slowest
        stage, chosen when the shape of the inputs is known. Blocks without a ``get_config`` have
        unknown work: about equally many in each stage.
      costs: the work by which stages are balanced: ``flops``: floating-point operations;
        ``measured``: seconds of each block on the first device.
      device_memory_gb: GiB of each device for weights, gradients, optimizer slots and activations,
        within which stages are balanced, and against which a given ``balance`` is checked, when the
        shape of the inputs is known; None: no limit.
      optimizer_slots: values per weight for this: 1 for SGD with momentum, 2 for Adam.
      batch_size: examples in a batch, for ``measured`` and ``device_memory_gb``; None: that of the
        inputs, if their shape has it.
      num_micro_batches: number of micro-batches of a batch, of equal or nearly equal size.
      rematerialize: whose activations the backward pass recomputes, in place of storing them:
        ``always``, ``except_last`` (all micro-batches but the last) or ``never``.
      schedule: ``gpipe``: all forward passes, then all backward passes; ``1f1b``: one forward and
        one backward pass in turn, which stores fewer activations; ``interleaved_1f1b``: likewise,
        with several stages on each device, which wait less. Best with a multiple of ``devices`` as
        ``num_micro_batches``.
      unroll: the graph of a ``gpipe`` step: True: a node for each pass of each micro-batch; False:
        loops, whose graph does not grow with the number of micro-batches; None: loops if there are
        more than 64 forward passes.
      name: of the model.

    Raises:
      UserError: if the blocks cannot be split like that, a device does not exist, a built block is
        on another device than its stage, or an option has no such value.
    """

    # Keras': what a call of ``fit``, ``evaluate`` or ``predict`` runs.
    train_function: Any
    test_function: Any
    predict_function: Any

    def __init__(
        self,
        blocks: Sequence[keras.layers.Layer | Sequence[keras.layers.Layer]]
        | keras.Model
        | Callable[[], keras.Model],
        devices: Sequence[str] | None = None,
        *,
        num_stages: int | None = None,
        balance: Sequence[int] | None = None,
        costs: str = "flops",
        device_memory_gb: float | None = None,
        optimizer_slots: float = 2.0,
        batch_size: int | None = None,
        num_micro_batches: int = 1,
        rematerialize: str = "except_last",
        schedule: str = "gpipe",
        unroll: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, autocast=False)  # as keras.Sequential
        require_keras_3()
        require_choice("costs", costs, ("flops", "measured"))
        # Before a functional model is cut, which uses them.
        require_choice("rematerialize", rematerialize, REMATERIALIZE)
        positive("num_micro_batches", num_micro_batches)
        for argument, value in (("num_stages", num_stages), ("batch_size", batch_size)):
            if value is not None:
                positive(argument, value)
        if device_memory_gb is not None:
            require_number("device_memory_gb", device_memory_gb, positive=True)
        require_number("optimizer_slots", optimizer_slots, positive=False)
        if devices is not None and (isinstance(devices, str) or not devices):
            raise UserError(f"devices is {devices!r}, but must be a list, as ['GPU:0', 'GPU:1']")
        refuse_tf_keras("blocks", blocks)
        schedule = canonical_schedule(schedule)
        devices = _devices(devices, num_stages, schedule)
        stages = len(devices) if num_stages is None else num_stages
        choose = functools.partial(
            _choose_balance,
            stages=stages,
            devices=len(devices),
            batch_size=batch_size,
            micro_batches=num_micro_batches,
            schedule=schedule,
            rematerialize=rematerialize,
            slots=optimizer_slots,
            limit=math.inf if device_memory_gb is None else device_memory_gb * 2**30,
            device=devices[0] if costs == "measured" else "",
            given=balance,
        )
        inputs = None
        is_unbuilt = isinstance(blocks, keras.Sequential) and not is_functional(blocks)
        if callable(blocks) and not is_unbuilt:
            of_stages = [devices[stage % len(devices)] for stage in range(stages)]
            blocks, balance = _cut_functional(blocks, of_stages, choose)
            inputs = blocks[0].input
        self.blocks = _as_blocks(blocks)
        # Of a functional model, the balance has been chosen. Where there is only one, costs are
        # counted only to check a limit of memory.
        only_one = balance is not None or stages in (1, len(self.blocks))
        chooses = inputs is None and (device_memory_gb is not None or not only_one)
        self._pipeline = Pipeline(
            self.blocks,
            devices,
            num_stages=stages,
            balance=balance,
            choose_balance=functools.partial(choose, self.blocks) if chooses else None,
            num_micro_batches=num_micro_batches,
            rematerialize=rematerialize,
            schedule=schedule,
            unroll=unroll,
        )
        self._compiled_loss = CompiledLoss(None, None)
        if inputs is not None:
            self.build_on(inputs)

    @property
    def pipeline(self) -> Pipeline:
        """The stages."""
        return self._pipeline

    def build(self, input_shape: Any) -> None:
        """Leaves building to the blocks, which are built by the call."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the last block's outputs, computed without micro-batches.

        Raises:
          UserError: at the first call, if stages share weights, or a weight is on another device
            than its stage.
        """
        return self._pipeline(inputs, training)

    def build_on(self, inputs: Any) -> None:
        """Makes the weights, each on the device of its stage; does nothing if they exist.

        Args:
          inputs: tensors or ``tf.TensorSpec`` of a batch, in any structure.

        Raises:
          UserError: if stages share weights, or a weight is on another device than its stage.
        """
        if self.built:
            return
        self._pipeline.cut_for(inputs)
        with tf.init_scope():
            tf.function(lambda batch: self(batch, training=False)).get_concrete_function(
                without_batch_size(inputs)
            )
        self._pipeline.place_seeds()

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns the inputs' shapes and dtypes, for loading."""
        if self._pipeline.input_specs is None:
            return None
        tensors = tf.nest.map_structure(
            lambda own: keras.KerasTensor(own.shape, own.dtype.name), self._pipeline.input_specs
        )
        return {"inputs": keras.saving.serialize_keras_object(tensors)}

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Makes the weights for inputs as of :meth:`get_build_config`."""
        tensors = keras.saving.deserialize_keras_object(config["inputs"])
        self.build_on(
            tf.nest.map_structure(lambda own: tf.TensorSpec(own.shape, own.dtype), tensors)
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the blocks and all options but devices and balance, for saving.

        ``blocks`` has each block once, and ``order`` the index of each in turn.
        """
        blocks = list(dict.fromkeys(self.blocks))
        return {
            "name": self.name,
            "blocks": [keras.saving.serialize_keras_object(block) for block in blocks],
            "order": [blocks.index(block) for block in self.blocks],
            "num_micro_batches": self._pipeline.num_micro_batches,
            "rematerialize": self._pipeline.rematerialize,
            "schedule": self._pipeline.schedule,
            "unroll": self._pipeline.unroll,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> GPipe:
        """Returns the model on one device, the first GPU or CPU."""
        blocks = [
            keras.saving.deserialize_keras_object(block, custom_objects)
            for block in config["blocks"]
        ]
        options = {**config, "devices": default_devices()[:1]}
        # Earlier versions saved a shared block several times, and no order.
        order = options.pop("order", range(len(blocks)))
        options["blocks"] = [blocks[place] for place in order]
        if options["schedule"] == "interleaved_1f1b":  # of several stages on a device
            options["schedule"] = "1f1b"
        return cls(**options)

    def add_loss(self, loss: Any) -> None:
        """Refuses losses that belong to no block.

        Raises:
          UserError: always.
        """
        raise UserError(
            "a pipeline computes the losses of its blocks only: call add_loss in the call of a "
            "layer in a block, or give the layer a regularizer"
        )

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        *args: Any,
        jit_compile: Any = False,
        **kwargs: Any,
    ) -> None:
        """Keras' ``compile``.

        Raises:
          UserError: if XLA is to compile the step.
        """
        if jit_compile not in (False, "auto"):
            raise UserError(
                "XLA cannot compile the step of a pipeline, whose stages are on devices of their "
                "own: leave jit_compile out of compile"
            )
        self._compiled_loss = CompiledLoss(loss, loss_weights)
        super().compile(optimizer, loss, loss_weights, *args, jit_compile=False, **kwargs)

    def compile_from_config(self, config: Mapping[str, Any]) -> None:
        """Compiles a loaded model as the saved one was, with the optimizer's variables."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self._pipeline.variables)

    def make_train_function(self, force: bool = False) -> None:
        """Keras' ``make_train_function``."""
        if force or self.train_function is None:
            super().make_train_function(force)
            self.train_function = self._built_first(self.train_function, trains=True)

    def make_test_function(self, force: bool = False) -> None:
        """Keras' ``make_test_function``."""
        if force or self.test_function is None:
            super().make_test_function(force)
            self.test_function = self._built_first(self.test_function)

    def make_predict_function(self, force: bool = False) -> None:
        """Keras' ``make_predict_function``."""
        if force or self.predict_function is None:
            super().make_predict_function(force)
            self.predict_function = self._built_first(self.predict_function)

    def _built_first(
        self, function: Callable[..., Any], trains: bool = False
    ) -> Callable[..., Any]:
        """Returns a function of batches that first makes the variables.

        Variables that the first step makes would have it traced a second time.
        """

        def built_first(batches: Any) -> Any:
            if isinstance(batches, Iterator) and not hasattr(batches, "element_spec"):
                batches = list(batches)  # those of train_on_batch and the like
            first = getattr(batches, "element_spec", None) or batches[0]
            self.build_on(_unpacked(first)[0])
            if trains and not self.optimizer.built:
                self.optimizer.build(self._pipeline.variables)
            return function(batches)

        return built_first

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """Keras' ``metrics``: the loss, those given to ``compile``, and the loss of each output."""
        return [*super().metrics, *self._compiled_loss.metrics]

    def train_step(self, data: Any) -> Mapping[str, tf.Tensor]:
        """Takes one step on a batch, with the loss and the optimizer given to ``compile``."""
        inputs, targets = _unpacked(data)
        examples = tf.shape(tf.nest.flatten(inputs)[0])[0]
        splits = self._pipeline.schedule != "gpipe"
        compiled = self._compiled_loss
        part = functools.partial(compiled.part, examples=examples)
        loss = part if splits else compiled.whole

        def scaled(outputs: Any, targets: Targets) -> tf.Tensor:
            return self.optimizer.scale_loss(loss(outputs, targets))

        self._check_weights()
        scale = self.optimizer.scale_loss(tf.constant(1.0))
        step = self._pipeline.compute(inputs, targets, scaled, scale)
        if compiled.loss is None and not any(stage.losses for stage in self._pipeline.stages):
            raise UserError("there is no loss to train with: give one to compile")
        checks = []
        if splits:
            of = (step.outputs, targets, examples, self._pipeline.num_micro_batches)
            with tf.device(self._pipeline.stages[-1].device):
                checks.append(check_splits(compiled, *of))
        with tf.control_dependencies(checks):
            gradients = [None if own is None else tf.identity(own) for own in step.gradients]
        self.optimizer.apply(gradients, self._pipeline.variables)
        return self._logs(inputs, targets, step.outputs, step.penalty / scale)

    def _logs(
        self, inputs: Any, targets: Targets, outputs: Any, penalty: tf.Tensor
    ) -> Mapping[str, tf.Tensor]:
        """Adds a batch to the metrics; returns their values."""
        loss = self._compiled_loss.logged(outputs, targets) + penalty
        of_all = next(metric for metric in self.metrics if metric.name == "loss")
        of_all.update_state(loss, sample_weight=tf.shape(tf.nest.flatten(inputs)[0])[0])
        labels, weights = targets.get("labels"), targets.get("weights")
        return self.compute_metrics(inputs, labels, outputs, weights)

    def _check_weights(self) -> None:
        """Refuses trainable weights of no block, which no stage would train."""
        trained = {id(variable) for variable in self._pipeline.variables}
        for variable in self.trainable_variables:
            if id(variable) not in trained:
                raise UserError(
                    f"{variable.path} belongs to the model but to no block, and a pipeline trains "
                    "the weights of its blocks only: make it a weight of a layer in a block"
                )

    def test_step(self, data: Any) -> Mapping[str, tf.Tensor]:
        """Evaluates a batch, in micro-batches."""
        inputs, targets = _unpacked(data)
        return self._logs(inputs, targets, *self._pipeline.predict(inputs))

    def predict_step(self, data: Any) -> Any:
        """Returns the outputs of a batch, computed in micro-batches."""
        inputs, _ = _unpacked(data)
        return self._pipeline.predict(inputs).outputs


def _unpacked(data: Any) -> tuple[Any, Targets]:
    inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(data)
    targets = {"labels": labels, "weights": weights}
    return inputs, {name: values for name, values in targets.items() if values is not None}


def default_devices() -> list[str]:
    """Returns the names of the GPUs or, without any, of the CPUs."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


def _devices(devices: Sequence[str] | None, stages: int | None, schedule: str) -> list[str]:
    if devices is not None:
        return list(devices)
    if stages is None or schedule == "interleaved_1f1b":
        return default_devices()
    return stage_devices(stages)


def _as_blocks(blocks: Any) -> list[keras.layers.Layer]:
    if isinstance(blocks, keras.Sequential):
        return list(blocks.layers)
    return [
        keras.Sequential(block) if isinstance(block, (list, tuple)) else block for block in blocks
    ]


def _cut_functional(
    model: keras.Model | Callable[[], keras.Model],
    devices: Sequence[str],
    choose: Callable[[Sequence[keras.Model], Any], Sequence[int] | None],
) -> tuple[list[keras.Model], list[int]]:
    """Returns a functional model's blocks, with weights on the stages' devices, and the balance."""
    make, given = model, None
    if isinstance(model, keras.layers.Layer):
        check_functional(model)
        make, given = functools.partial(clone, model), model
    network, blocks, balance = build_in_stages(
        make, devices, lambda blocks: choose(blocks, blocks[0].input)
    )
    if given is not None:
        network.set_weights(given.get_weights())
        for layer, copy in zip(layers_in(given), layers_in(network)):
            if hasattr(layer, "set_vocabulary"):  # of a lookup layer: not a weight
                copy.set_vocabulary(layer.get_vocabulary(include_special_tokens=False))
    return blocks, balance


def _choose_balance(
    blocks: Sequence[keras.layers.Layer],
    inputs: Any,
    *,
    stages: int,
    batch_size: int | None,
    micro_batches: int,
    limit: float,
    device: str,
    given: Sequence[int] | None,
    **options: Any,
) -> Sequence[int] | None:
    """Returns the balance by cost or the given one; None: no cost of a block can be estimated.

    Raises:
      UserError: if the batch size is needed and unknown, or the stages do not fit.
    """
    if given is not None:
        if math.isinf(limit):
            return given
        bounds(given, len(blocks), stages)
    batch_size = batch_size or tf.nest.flatten(inputs)[0].shape[0]
    if batch_size is None:
        if device or math.isfinite(limit):
            raise UserError(
                "costs='measured' and device_memory_gb depend on the batch size, which the shape "
                "of the inputs does not have: give GPipe a batch_size"
            )
        micro_batches = min(micro_batches, _MICRO_BATCHES)
        batch_size = _EXAMPLES * micro_batches
    try:
        return balance_for(
            blocks,
            inputs,
            stages,
            batch_size=batch_size,
            micro_batches=min(micro_batches, batch_size),
            limit=limit,
            device=device if given is None else "",
            given=given,
            **options,
        )
    except NotImplementedError as error:
        unlimited = "" if math.isinf(limit) else "; device_memory_gb is not checked"
        warn_once(
            f"the work of a block cannot be estimated, because {error}: the stages of the pipeline "
            f"get about equally many blocks, unless GPipe is given a balance{unlimited}"
        )
        return given
