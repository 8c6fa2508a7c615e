"""A pipeline: consecutive stages on devices of their own, and the gradients of a batch."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from imagenet_fast.base.errors import UserError, require_choice
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.base.keras_check import is_tf_keras
from imagenet_fast.layers.seeds import count, draw_by_replica, seed_states
from imagenet_fast.pipeline_parallel.forward_passes import Forward, forward_passes
from imagenet_fast.pipeline_parallel.micro_batches import MicroBatches, check_batch
from imagenet_fast.pipeline_parallel.options import REMATERIALIZE
from imagenet_fast.pipeline_parallel.partition import bounds, check_stages
from imagenet_fast.pipeline_parallel.passes import Passes, check_loss, looped, unrolled
from imagenet_fast.pipeline_parallel.placement import full_device_name
from imagenet_fast.pipeline_parallel.programs import Loss, Programs, spec_of
from imagenet_fast.pipeline_parallel.schedules import canonical_schedule
from imagenet_fast.pipeline_parallel.simulation import keeps_activations
from imagenet_fast.pipeline_parallel.stage import Stage, masked, with_masks
from imagenet_fast.pipeline_parallel.statistics import commit

# A graph of more forward passes has loops. Tracing 4 stages with 64 micro-batches takes 5.9 s
# unrolled and 1.1 s with loops (benchmarks/pipeline).
_MOST_UNROLLED = 64


class BatchResult(NamedTuple):
    """Results of a batch.

    Attributes:
      outputs: of the last block, with Keras masks.
      gradients: of the loss for each trainable variable, on its device; None: the loss does not
        depend on it.
      loss: without regularization, float32.
      penalty: regularization and ``add_loss``, float32.
    """

    outputs: Any
    gradients: list[tf.Tensor | None]
    loss: tf.Tensor
    penalty: tf.Tensor


class Pipeline:
    """Consecutive blocks, cut into stages on devices of their own.

    It is no Keras layer: a model has to own the blocks.

    Arguments that are not here are those of
    :class:`~imagenet_fast.pipeline_parallel.gpipe.GPipe`.

    Args:
      devices: names of the devices, in order; stage k is on device k % len(devices).
      num_stages: number of stages; None: one for each device.
      balance: number of blocks of each stage; None: that of ``choose_balance`` or, without one,
        about equally many.
      choose_balance: returns the number of blocks of each stage, or None, for the specs of a
        batch's inputs. Called when these are known; if there is only one balance, or ``balance`` is
        given, only for the errors that it raises. None: there is no such function.

    Attributes:
      stages: in order; empty until the balance is known.
      input_specs: ``tf.TensorSpec`` of the inputs of the first call, for any batch size; None:
        there was none.

    Raises:
      UserError: if the blocks cannot be split like that, a device does not exist, or an option has
        no such value.
    """

    def __init__(
        self,
        blocks: Sequence[keras.layers.Layer],
        devices: Sequence[str],
        *,
        num_stages: int | None = None,
        balance: Sequence[int] | None = None,
        choose_balance: Callable[[Any], Sequence[int] | None] | None = None,
        num_micro_batches: int = 1,
        rematerialize: str = "except_last",
        schedule: str = "gpipe",
        unroll: bool | None = None,
    ) -> None:
        require_keras_3()
        self.num_micro_batches = positive("num_micro_batches", num_micro_batches)
        require_choice("rematerialize", rematerialize, REMATERIALIZE)
        self.schedule = canonical_schedule(schedule)
        if self.schedule != "gpipe" and unroll is False:
            raise UserError(f"schedule={self.schedule} has no graph with loops: leave out unroll")
        for block in blocks:
            _check_block(block)
        for device in devices:
            _check_device(device)
        self.devices = list(devices)
        stages = len(devices) if num_stages is None else num_stages
        _check_interleaving(self.schedule, stages, len(devices))
        check_stages(len(blocks), stages)
        self.rematerialize = rematerialize
        self.unroll = unroll
        self.input_specs: Any = None
        self.stages: list[Stage] = []
        self._blocks, self._count = list(blocks), stages
        self._choose_balance = choose_balance
        if balance is not None or choose_balance is None or stages in (1, len(blocks)):
            self._cut(balance)

    @property
    def variables(self) -> list[keras.Variable]:
        """The trainable variables, stage by stage."""
        return [variable for stage in self.stages for variable in stage.variables]

    @tf.autograph.experimental.do_not_convert
    def cut_for(self, inputs: Any) -> None:
        """Makes the stages, if their balance depends on the inputs, at the first call.

        Args:
          inputs: tensors or ``tf.TensorSpec`` of a batch, in any structure.

        Raises:
          UserError: if the stages do not fit into the devices' memory, or a pipeline cannot split
            the inputs.
        """
        check_batch("inputs", inputs)
        if self._choose_balance is None:
            return
        specs = tf.nest.map_structure(spec_of, inputs)
        with tf.init_scope():
            balance = self._choose_balance(specs)
            if not self.stages:
                self._cut(balance)
        self._choose_balance = None

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the last block's outputs, computed without micro-batches.

        Raises:
          UserError: at the first call, if :meth:`check_placement` finds a fault.
        """
        self.cut_for(inputs)
        outputs = inputs
        for stage in self.stages:
            with tf.device(stage.device):
                received = masked(tf.nest.map_structure(tf.identity, with_masks(outputs)))
                outputs = stage(received, training)
        if self.input_specs is None:
            self.check_placement()
            self.input_specs = without_batch_size(inputs)
        return outputs

    # No Python here depends on tensors; that of the blocks may, and is converted.
    @tf.autograph.experimental.do_not_convert
    def predict(self, inputs: Any) -> Forward:
        """Computes a batch's outputs outside of training, in micro-batches as in training.

        To be called in a ``tf.function``, with built blocks and a batch of any size.
        """
        self.cut_for(inputs)
        return forward_passes(self.stages, inputs, self.num_micro_batches)

    @tf.autograph.experimental.do_not_convert
    def compute(self, inputs: Any, targets: Any, loss: Loss, scale: Any = 1.0) -> BatchResult:
        """Computes a batch forward and backward, and updates moving averages.

        To be called in a ``tf.function``, with built blocks.

        Args:
          inputs: tensors in any structure, whose first dimension is the batch.
          targets: the same; what the loss needs besides the outputs.
          loss: from outputs and targets to a scalar. ``gpipe`` calls it once, for the whole batch;
            ``1f1b`` and ``interleaved_1f1b`` for each micro-batch, and the loss is the sum.
          scale: loss scale that ``loss`` includes, by which regularization is to be multiplied.

        Raises:
          UserError: if a block does what a pipeline cannot repeat or move.
        """
        self.place_seeds()
        batch = MicroBatches(with_masks(inputs), targets, self.num_micro_batches)
        whole = self.schedule == "gpipe"
        passes = Passes(
            self.stages,
            self._programs(batch, None if whole else loss),
            len(self.devices),
            batch,
            loss if whole else None,
            targets,
            scale,
            self.rematerialize,
        )
        if self._has_loops(batch.count, passes.programs):
            looped(passes, keep=self.rematerialize == "never")
        else:
            unrolled(passes, self.schedule)
        gradients: list[tf.Tensor | None] = []
        penalties, reached = [], passes.reached
        for stage, programs, (_, totals) in reversed(
            list(zip(self.stages, passes.programs, passes.state))
        ):
            commit(stage.norms, programs.moments(totals))
            of_stage, reached = programs.gradients(totals, reached)
            gradients = of_stage + gradients
            penalties.append(totals.penalty)
        states = [state for block in self._blocks for state in seed_states(block)]
        for state in {id(state): state for state in states}.values():
            count(state)
        return BatchResult(
            masked(passes.outputs),
            gradients,
            passes.state[-1].totals.loss,
            tf.add_n(penalties),
        )

    def _cut(self, balance: Sequence[int] | None) -> None:
        parts = bounds(balance, len(self._blocks), self._count)
        self.stages = [
            Stage(self._blocks[begin:end], device)
            for (begin, end), device in zip(parts, itertools.cycle(self.devices))
        ]
        self.place_seeds(again=True)
        self.check_placement()

    def place_seeds(self, again: bool = False) -> None:
        """Makes Keras' random layers draw by micro-batch, with states on their stages' devices.

        To be called again after layers have made further ones, as some do when they are built.

        With ``again``, also those that do already, whose states may be on other devices.
        """
        with tf.init_scope():
            for stage in self.stages:
                with tf.device(stage.device):
                    for block in stage.blocks:
                        draw_by_replica(block, again)

    def check_placement(self) -> None:
        """Checks that all existing weights are on the devices of their stages.

        Raises:
          UserError: if one is not, or several stages share it.
        """
        owners: dict[int, int] = {}
        canonical = functools.cache(full_device_name)
        for place, stage in enumerate(self.stages):
            built = [block for block in stage.blocks if block.built]
            for variable in itertools.chain.from_iterable(block.variables for block in built):
                first = owners.setdefault(id(variable), place)
                if first != place:
                    raise UserError(
                        f"{variable.path} is shared by blocks of stages {first} and {place}: put "
                        "them into one stage, or give each a weight of its own"
                    )
                if canonical(variable.value.device) != canonical(stage.device):
                    raise UserError(
                        f"{variable.path} is on {variable.value.device}, but its stage is on "
                        f"{stage.device}: give the pipeline blocks that are not built yet"
                    )

    def _programs(self, batch: MicroBatches, loss: Loss | None) -> list[Programs]:
        """Returns the functions of all stages."""
        made: list[Programs] = []
        inputs, targets = batch.specs
        stored = keeps_activations(self.rematerialize, 0, batch.count)
        for place, stage in enumerate(self.stages):
            own_loss = loss if place == len(self.stages) - 1 else None
            own_targets = () if own_loss is None else targets
            # With a loss of each micro-batch, the backward pass follows the forward pass at once.
            recomputes = not stored and own_loss is None
            with tf.device(stage.device):
                programs = Programs(stage, inputs, own_targets, own_loss, place == 0, recomputes)
            made.append(programs)
            inputs = programs.outputs
        self._check_reads(made)
        return made

    def _check_reads(self, programs: Sequence[Programs]) -> None:
        """Refuses variables that are read where their gradient would be lost."""
        owners = {
            variable.value.ref(): (place, variable.path)
            for place, stage in enumerate(self.stages)
            for variable in stage.variables
        }
        check_loss(programs[-1].variables_in_loss, self.stages)
        for place, each in enumerate(programs):
            for variable in each.variables_read:
                owner, path = owners.get(variable.ref(), (place, ""))
                if owner != place:
                    raise UserError(
                        f"{path} of stage {owner} is read by a block of stage {place}, "
                        "where a pipeline would lose its gradient: put both blocks into one "
                        "stage, or give each a weight of its own"
                    )

    def _has_loops(self, count: int, programs: Sequence[Programs]) -> bool:
        if self.schedule != "gpipe" or count == 1 or self.unroll:
            return False
        # The lists of values that loops in blocks, such as SimpleRNN's, keep for their gradients.
        lists = any(value.dtype == tf.variant for each in programs for value in each.activations)
        if lists and self.rematerialize == "never":
            if self.unroll is None:
                return False
            raise UserError(
                "unroll=False cannot store the activations of layers that have loops themselves, "
                "such as SimpleRNN: leave out unroll, or rematerialize='never'"
            )
        return self.unroll is False or len(self.stages) * count > _MOST_UNROLLED


def require_keras_3() -> None:
    """Refuses the Keras of TensorFlow 2.15.

    Raises:
      UserError: under Keras 2.
    """
    if KERAS_2:
        raise UserError(
            f"pipelines need Keras 3, but Keras {keras.__version__} is installed: install "
            "TensorFlow 2.16 or later"
        )


def refuse_tf_keras(argument: str, value: Any) -> None:
    """Refuses layers and models of the package ``tf_keras``, which has Keras 2.

    Raises:
      UserError: if the value is one.
    """
    if is_tf_keras(type(value)):
        raise UserError(
            f"{argument} {value!r} is of the package tf_keras: make it with Keras (`import keras`)"
        )


def without_batch_size(inputs: Any) -> Any:
    """Returns the ``tf.TensorSpec`` of tensors, for any batch size."""
    return tf.nest.map_structure(
        lambda batch: tf.TensorSpec([None, *batch.shape[1:]], batch.dtype), inputs
    )


def positive(name: str, number: Any) -> int:
    """Returns the value of an argument that must be a positive integer.

    Raises:
      UserError: if it is not.
    """
    try:
        count = operator.index(number)
    except TypeError:
        raise UserError(f"{name} is {number!r}, but must be an integer") from None
    if count < 1:
        raise UserError(f"{name} is {count}, but must be positive")
    return count


def require_number(name: str, number: Any, *, positive: bool) -> None:
    """Checks that an argument is a finite number, positive or at least not negative.

    Raises:
      UserError: if it is not.
    """
    must = "a positive number" if positive else "a number, not negative"
    real = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not real or not math.isfinite(number) or number < 0 or (positive and not number):
        raise UserError(f"{name} is {number!r}, but must be {must}")


def _check_interleaving(schedule: str, stages: int, devices: int) -> None:
    """Checks that the schedule fits the number of stages of each device."""
    if schedule != "interleaved_1f1b":
        if stages != devices:
            raise UserError(
                f"num_stages is {stages}, but there are {devices} devices: give each stage one, or "
                "use schedule='interleaved_1f1b', which has several stages on each device"
            )
    elif stages % devices or stages == devices:
        raise UserError(
            f"schedule={schedule} has several stages on each device, equally many, but num_stages "
            f"is {stages} and the number of devices {devices}: give num_stages={2 * devices}, or "
            "use schedule='1f1b'"
        )


def _check_device(name: str) -> None:
    try:
        wanted = tf.DeviceSpec.from_string(name)
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"device {name!r} is no name of a device, such as 'GPU:0'") from None
    listed = [device.name for device in tf.config.list_logical_devices()]
    if not any(_matches(wanted, tf.DeviceSpec.from_string(device)) for device in listed):
        raise UserError(f"device {name!r} does not exist; there are {', '.join(listed)}")


def _matches(wanted: tf.DeviceSpec, device: tf.DeviceSpec) -> bool:
    """Whether all parts of a name that both specify are equal."""
    parts = [
        (getattr(wanted, part), getattr(device, part))
        for part in ("job", "replica", "task", "device_type", "device_index")
    ]
    return all(one is None or other is None or one == other for one, other in parts)


def _check_block(block: Any) -> None:
    if not isinstance(block, keras.layers.Layer):
        refuse_tf_keras("block", block)
        raise UserError(
            f"{block!r} cannot be a block of a pipeline, which takes Keras layers and models; a "
            "function can be put into a keras.layers.Lambda"
        )
    needed = [
        name
        for name, parameter in inspect.signature(block.call).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name != "training"
    ]
    if len(needed) != 1:
        raise UserError(
            f"block {block.name!r} takes {len(needed)} inputs ({', '.join(needed)}), but a block "
            "of a pipeline takes one: wrap it in a layer whose call(self, inputs) unpacks a tuple, "
            "and have the block before it return that tuple"
        )
