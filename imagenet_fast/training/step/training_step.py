"""The training, evaluation and prediction steps of large-batch recipes, as a Keras model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.keras_2 import KERAS_2, KERAS_3_16, name_of
from imagenet_fast.base.notices import warn_once
from imagenet_fast.data.on_device import ImagesOnDevice
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.one_call import assign_local, local_values
from imagenet_fast.distribute.workers import workers_of
from imagenet_fast.layers import micro_batch
from imagenet_fast.layers.seeds import UnseededDraws, seed_states
from imagenet_fast.optimizers.loss_scale import scaled_loss, without_all_reduce
from imagenet_fast.optimizers.slots import check_scope, make_slots
from imagenet_fast.pipeline_parallel.pipeline import Pipeline
from imagenet_fast.pipeline_parallel.programs import sum_of
from imagenet_fast.pipeline_parallel.stage_all_reduce import StageAllReduce
from imagenet_fast.training.step.batch import is_step_number, per_image, renumbered, unpacked
from imagenet_fast.training.step.distillation import Teacher
from imagenet_fast.training.step.error_analysis import Predictions
from imagenet_fast.training.step.losses import Focus, class_probabilities, image_losses
from imagenet_fast.training.step.metric_sums import NAMES, Metric, MetricSums, batch_sums
from imagenet_fast.training.step.micro_batches import micro_batches
from imagenet_fast.training.step.mix import Mixer
from imagenet_fast.training.step.rematerialization import Rematerialization
from imagenet_fast.training.step.replicated_model import ReplicatedModel, states_in, statistics_in
from imagenet_fast.training.step.scores import Scores
from imagenet_fast.training.step.selection import Selection
from imagenet_fast.training.step.views import logits_over_views

Tensors = list[tf.Tensor]


class TrainingStep(ReplicatedModel):
    """A functional model from pixels to float32 logits that trains as the papers do.

    Its training step differs from Keras' where the papers do:

    * the loss is the sum over images divided by the *global* batch size, in float32, so one device
      and any number of replicas take the same step;
    * micro-batches are accumulated inside the step: one all-reduce, one update of the weights, one
      update of batch norm's moving averages;
    * logical replicas have batches, batch norm and random numbers of their own, of which a device
      may carry several;
    * gradients and metrics are all-reduced together, before the optimizer clips or scales;
    * the reported loss has no loss scale, regularization or float16 rounding;
    * XLA compiles the whole step on one device; on several it compiles each replica's forward and
      backward pass, but not the update, which their strategies cannot compile.

    :class:`imagenet_fast.training.step.classifier.Classifier` adds ``fit``, ``evaluate`` and so on.

    Args:
      inputs: the functional model's input.
      outputs: its logits, float32 [batch, classes].
      loss: of an image, see ``image_losses``.
      label_smoothing: probability spread evenly over all classes.
      focus: of focal and asymmetric losses.
      selection: chooses the images to train on, before they are mixed; None: all. Training metrics
        are of these images.
      mixer: mixup and cutmix of the images of each training micro-batch; None: neither.
      views: test-time augmentation, see ``training/step/views.py``.
      views_fraction: of the images of a batch over whose views logits are averaged, see
        ``logits_over_views``.
      accumulation_steps: micro-batches in each logical replica's part of a step.
      replicas_each: logical replicas that each replica of the strategy carries, in turn.
      replicas_together: of these, in one forward pass, because they share batch-norm statistics.
      pipeline: runs the layers from normalized pixels to logits; None: the model itself does.
      xla: whether XLA compiles the step, or as much of it as it can.
      unseeded_draws: of the network's layers that draw without a seed; None: it has none.
      name: the model's name.

    Attributes:
      steps_per_epoch: steps in an epoch; None: those of the data set.
      all_reduce: the all-reduce of gradients and metrics; None: the strategy's.
      training_images: makes batches on the device, for data that holds step numbers.
      validation_images: the same for evaluation.
      selection: see above; never None.
      class_weights: of the training loss, float64 [classes]; None: 1.
      class_numbers: the class of each label, of data with other numbers for the classes than the
        model; None: the label.
      rematerialization: of the network's activations; None: they are stored.
      teacher: whose outputs are learned instead of labels; None: labels.
      competing: the classes among which alone ``test_step`` evaluates, whose labels are their
        indices here; None: all.
    """

    def __init__(
        self,
        inputs: Any,
        outputs: Any,
        *,
        loss: str = "cross_entropy",
        label_smoothing: float = 0.0,
        focus: Focus | None = None,
        selection: Selection | None = None,
        mixer: Mixer | None = None,
        views: str = "none",
        views_fraction: float = 1.0,
        accumulation_steps: int = 1,
        replicas_each: int = 1,
        replicas_together: int = 1,
        pipeline: Pipeline | None = None,
        xla: bool = False,
        unseeded_draws: UnseededDraws | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        # Keras' ``loss`` is that of ``compile``.
        self.image_loss = loss
        self.label_smoothing = label_smoothing
        self.focus = focus
        self.selection = selection or Selection()
        self.mixer = mixer
        self.views = views
        self.views_fraction = views_fraction
        self.accumulation_steps = accumulation_steps
        self.replicas_each = replicas_each
        self.replicas_together = replicas_together
        # Those of the strategy's replica.
        self._micro_batches = accumulation_steps * replicas_each // replicas_together
        self.pipeline = pipeline
        self.unseeded_draws = unseeded_draws
        self.steps_per_epoch: int | None = None
        self.training_images: ImagesOnDevice | None = None
        self.validation_images: ImagesOnDevice | None = None
        self.class_weights: np.ndarray | None = None
        self.class_numbers: Sequence[int] | None = None
        self.rematerialization: Rematerialization | None = None
        self.teacher: Teacher | None = None
        self.competing: Sequence[int] | None = None
        self.metric_sums = MetricSums()
        self.all_reduce: AllReduce | StageAllReduce | None = None
        # Each replica returns the metrics of all replicas, which Keras would add up.
        self.distribute_reduction_method = "first"
        self._xla = xla
        self._is_in_fit = False

    def compile(self, optimizer: Any = "rmsprop", loss: Any = None, **kwargs: Any) -> None:
        """Keras' ``compile``; only the optimizer has an effect.

        Raises:
          UserError: if the optimizer was not made in the scope of the model's strategy.
        """
        # Weights mark images that do not count; Keras 2 would warn that it ignores them.
        metrics: dict[str, Any] = {"weighted_metrics": []} if KERAS_2 else {}
        if isinstance(optimizer, keras.optimizers.Optimizer):
            check_scope(optimizer, self.distribute_strategy)
        if loss or kwargs.get("metrics"):
            warn_once("compile: loss and metrics have no effect, because the recipe's are used")
        with self.distribute_strategy.scope():
            super().compile(optimizer, loss, **{**metrics, "jit_compile": False, **kwargs})
        # Plain functions unless XLA compiles them: inside tf.functions, replicas of a
        # MirroredStrategy could not synchronize batch norm.
        self._forward_backward = self._micro_batch_gradients
        # Compiled again each time: the graphs depend on the optimizer and the trainable layers.
        if self._xla and self.distribute_strategy.num_replicas_in_sync == 1:
            step = functools.partial(type(self).train_step, self)
            self.train_step = _compiled(step)  # type: ignore[method-assign]
        elif self._xla:
            self._forward_backward = _compiled(self._micro_batch_gradients)

    def make_train_function(self, force: bool = False) -> Callable[..., Any] | None:
        """Keras' ``make_train_function``, which sets ``train_function``; Keras 2 returns it."""
        # Slots made in the first step would cause a second trace.
        self.make_slots()
        self._is_in_fit = True
        return super().make_train_function(force)

    def _maybe_symbolic_build(self, *_: Any, **__: Any) -> None:
        """Nothing: all is built, and Keras 3 would fail on a first batch of unequal parts."""

    def make_slots(self) -> None:
        """Makes the optimizer's variables, otherwise made in its first step."""
        check_scope(self.optimizer, self.distribute_strategy)  # Keras lets a user replace it.
        with self.distribute_strategy.scope():
            make_slots(self.optimizer, self.trainable_variables)
            self.selection.make_slots()

    def train_step(self, data: Any) -> Mapping[str, tf.Tensor]:
        """Takes one step on this replica's part of the global batch."""
        gradients, sums = self.gradients(data)
        *gradients, sums = self._all_reduce(gradients, sums)
        self.update(gradients)
        self.metric_sums.add(sums)
        return self._reported_metrics()

    def test_step(
        self, data: Any, predictions: Predictions | Scores | None = None
    ) -> Mapping[str, tf.Tensor]:
        """Adds one batch to the metrics, over all replicas.

        Args:
          data: as in :meth:`batch`.
          predictions: get this replica's predictions; None: they are not kept.
        """
        images, labels, weights = self.batch(data, "validation")
        logits = self.logits(images, weights)
        if self.competing is not None:
            logits = tf.gather(logits, tf.constant(self.competing), axis=1)
        if predictions is not None:
            predictions.add(images, labels, weights, logits)
        losses = self._image_losses(logits, labels)
        sums = batch_sums(logits, losses, labels, weights)
        context = tf.distribute.get_replica_context()
        self.metric_sums.add(context.all_reduce(tf.distribute.ReduceOp.SUM, sums))
        return self._reported_metrics()

    def _reported_metrics(self) -> Mapping[str, tf.Tensor]:
        """Returns the metrics over all images so far, the same in all replicas.

        Scalars, but [1] with several workers, over whose first axis Keras 3's ``fit`` takes the
        mean, and fails with scalars (``keras/src/backend/tensorflow/trainer.py``,
        ``reduce_per_replica``).
        """
        results = self.metric_sums.results()
        if KERAS_2 or workers_of(self.distribute_strategy) is None:
            return results
        return {name: value[tf.newaxis] for name, value in results.items()}

    def predict_step(self, data: Any) -> tf.Tensor:
        """Returns class probabilities, float32 [batch, classes]."""
        if is_step_number(data):
            images, _, weights = self.batch(data, "validation")
        else:
            images, _, weights = keras.utils.unpack_x_y_sample_weight(data)
            weights = None if weights is None else per_image("weights are", weights)
        return class_probabilities(self.logits(images, weights), self.image_loss)

    def batch(self, data: Any, split: str) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the images, labels and weights of a replica's part of a step.

        Args:
          data: an element of ``make_dataset``: a batch, or a step number, whose batch is made here,
            on the device.
          split: ``train`` or ``validation``.
        """
        if is_step_number(data):
            made = {"train": self.training_images, "validation": self.validation_images}[split]
            if made is None:
                raise UserError(
                    "the data hold step numbers instead of images, as with data_on_device, but "
                    f"this model has no {split} images: build it with the data's Config"
                )
            context = tf.distribute.get_replica_context()
            images, labels, weights = made.batch(data["step"], context.replica_id_in_sync_group)
        else:
            images, labels, weights = unpacked(data, self.image_loss != "cross_entropy")
        if self.class_numbers is not None:
            labels = renumbered(labels, self.class_numbers, self.output_shape[-1])
        return images, labels, weights

    def logits(self, images: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the mean logits over the views of each image, float32 [batch, classes].

        Args:
          images: [batch, height, width, 3], of the model input's dtype.
          weights: [batch]; 0 for images that do not count; None: all count.
        """
        return logits_over_views(
            self._logits_of_view, images, self.views, self.views_fraction, weights, self.image_loss
        )

    def _logits_of_view(self, images: tf.Tensor) -> tf.Tensor:
        if self.pipeline is None:
            return self(images, training=False)
        return self.pipeline.predict(self._normalized(images)).outputs

    def _normalized(self, images: tf.Tensor) -> tf.Tensor:
        """Returns the input of the pipeline."""
        return self.get_layer("normalize")(images)

    def gradients(self, data: Any) -> tuple[Tensors, tf.Tensor]:
        """Returns the gradients and metric sums of a replica's part of a step.

        To be called in a replica. Updates batch-norm statistics and dropout states.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        step = tf.convert_to_tensor(self.optimizer.iterations)
        draws = self.unseeded_draws
        with contextlib.nullcontext() if draws is None else draws.of_step(step):
            batch, unselected = self._selected(self.batch(data, "train"), replica)
            random_numbers: tuple[tf.Tensor, ...] = ()
            if self.mixer is not None:
                random_numbers = (self.mixer.draw(tf.shape(batch[0])[0], step, replica),)
            global_batch = self._global_batch(data, batch[0])
            gradients, sums = self._accumulate(global_batch, *batch, *random_numbers)
        return gradients, sums + unselected

    def _global_batch(self, data: Any, images: tf.Tensor) -> tf.Tensor:
        """Returns the number of all replicas' images, float32, from the data and this part's."""
        context = tf.distribute.get_replica_context()
        replicas, count = context.num_replicas_in_sync, tf.shape(images)[0]
        may_be_partial = not is_step_number(data) and (
            images.shape[0] is None or (KERAS_3_16 and self._is_in_fit)
        )
        if may_be_partial and replicas > 1:
            # Keras splits a smaller last batch unequally between replicas.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(count, tf.float32))
        return tf.cast(count * replicas, tf.float32)

    def _selected(
        self, batch: tuple[tf.Tensor, tf.Tensor, tf.Tensor], replica: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, ...], tf.Tensor | float]:
        """Returns the images to train on, and the metric sums of the others."""
        choose = functools.partial(
            self.selection.choose,
            network_losses=self._losses_in_training,
            iterations=self.optimizer.iterations,
        )
        if self.replicas_each == 1 or not self.selection.selects:
            return choose(batch)

        def choose_of_one(parts: Tensors) -> tuple[tf.Tensor, ...]:
            number, *part = parts
            with micro_batch.logical_replica(replica * self.replicas_each + number):
                chosen, unselected = choose(tuple(part))
            return *chosen, unselected

        numbers = tf.range(self.replicas_each)
        *chosen, unselected = tf.map_fn(
            choose_of_one,
            [numbers, *micro_batches(batch, self.replicas_each)],
            fn_output_signature=(*(part.dtype for part in batch), tf.float32),
            parallel_iterations=1,
        )
        flat = (tf.reshape(part, [-1, *part.shape[2:]]) for part in chosen)
        return tuple(flat), tf.reduce_sum(unselected, axis=0)

    def _losses_in_training(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Returns the images' losses in training mode, float32 [batch]; leaves all states."""
        states = [*statistics_in(self), *self.draws()]
        before = local_values(states)
        losses = self._image_losses(self(images, training=True), labels)
        assign_local(states, before)
        return losses

    def draws(self) -> list[Any]:
        """Returns the states of all that draws random numbers in a forward pass."""
        unseeded = self.unseeded_draws
        return [*seed_states(self), *([] if unseeded is None else [unseeded.state])]

    def treats_images_alone(self) -> bool:
        """Returns whether a step is the same, up to rounding, with micro-batches of any size.

        It is unless an image's gradient depends on others, as by batch norm, mixup or
        ``select_by_loss``, or on random numbers that layers draw for a micro-batch at once.
        """
        if self.mixer is not None or self.selection.selects or states_in(self):
            return False
        draws = self.unseeded_draws
        if draws is None:
            return True
        images = self.inputs[0]

        def in_replica() -> tf.Tensor:
            with draws.of_step(0):
                return self(tf.zeros([1, *images.shape[1:]], images.dtype), training=True)

        strategy = tf.distribute.get_strategy()
        # Traced, not run.
        tf.function(lambda: strategy.run(in_replica), autograph=False).get_concrete_function()
        return not draws.is_used

    def update(self, gradients: Tensors) -> None:
        """Updates the weights and their shadow weights; to be called in a replica.

        Args:
          gradients: of the trainable variables, summed over the replicas, times the loss scale if
            there is one.
        """
        step = tf.convert_to_tensor(self.optimizer.iterations)
        with without_all_reduce(self.optimizer) as update:
            update(gradients, self.trainable_variables)
        if self.lookahead is not None:
            self.lookahead.update(step + 1)
        if self.weight_average is not None:
            self.weight_average.update(
                step % self.steps_per_epoch if self.steps_per_epoch else step
            )

    @property
    def metrics(self) -> list[Any]:
        """Keras' ``metrics``: those that a step returns, over all images so far.

        Without them, Keras' progress bar would show means over steps.
        """
        return [Metric(name, self.metric_sums) for name in NAMES]

    def reset_metrics(self) -> None:
        """Keras' ``reset_metrics``, in one call for all metrics."""
        self.metric_sums.reset()

    def _all_reduce(self, gradients: Tensors, sums: tf.Tensor) -> Tensors:
        if self.all_reduce is None:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, sums])
        # Metric sums count images: never rounded, even if gradients are.
        return self.all_reduce(gradients, [sums], variables=self.trainable_variables)

    def _accumulate(self, global_batch: tf.Tensor, *batch: tf.Tensor) -> tuple[Tensors, tf.Tensor]:
        """Returns this replica's gradients and metric sums, over its micro-batches."""
        if self.pipeline is not None:
            return self._pipeline_gradients(self.pipeline, global_batch, *batch)
        if self._micro_batches == 1:
            return self._forward_backward(global_batch, None, *batch)
        parts = micro_batches(batch, self._micro_batches)
        statistics = statistics_in(self)
        draws = self.draws() if self.replicas_each > 1 else []
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        before, undrawn = local_values(statistics), local_values(draws)

        def add(step: tf.Tensor, *totals: Any) -> tuple[Any, ...]:
            # Like replicas, micro-batches start from the same statistics; the step applies the mean
            # of their changes.
            assign_local(statistics, before)
            logical = None
            if self.replicas_each > 1:
                first = tf.equal(step % self.accumulation_steps, 0)
                states = zip(undrawn, local_values(draws))
                assign_local(draws, [tf.where(first, *values) for values in states])
                number = step // self.accumulation_steps
                logical = replica * (self.replicas_each // self.replicas_together) + number
            new, new_sums = self._forward_backward(
                global_batch, logical, *(part[step] for part in parts)
            )
            changes = [after - start for after, start in zip(local_values(statistics), before)]
            return step + 1, *tf.nest.map_structure(tf.add, totals, (new, new_sums, changes))

        no_gradients = [tf.zeros(variable.shape) for variable in self.trainable_variables]
        no_changes = [tf.zeros(variable.shape) for variable in statistics]
        _, gradients, sums, changes = tf.while_loop(
            lambda step, *_: step < self._micro_batches,
            add,
            (tf.constant(0), no_gradients, tf.zeros_like(self.metric_sums.variable), no_changes),
            parallel_iterations=1,
        )
        assign_local(
            statistics,
            [start + change / self._micro_batches for start, change in zip(before, changes)],
        )
        return gradients, sums

    def _micro_batch_gradients(
        self,
        global_batch: tf.Tensor,
        logical: tf.Tensor | None,
        images: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
        *random_numbers: tf.Tensor,
    ) -> tuple[Tensors, tf.Tensor]:
        """Returns float32 gradients of a micro-batch's part of the loss, and its metric sums.

        ``logical`` is the number of the logical replica, None if it is the strategy's;
        ``random_numbers`` are the mixer's, if there is one.
        """
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        images, *mixed = self._mixed(
            self.replicas_together, images, labels, weights, *random_numbers
        )
        parts = replicas * self._micro_batches
        with micro_batch.logical_replica(logical):
            if self.rematerialization is None:
                with tf.GradientTape() as tape:
                    logits = self(images, training=True)
                    losses = self._training_losses(logits, labels, *mixed)
                    loss = tf.reduce_sum(losses * weights) / global_batch
                    if self.losses:  # regularization: each micro-batch adds its part
                        loss += sum_of(self.losses) / parts
                    loss = self._scaled(loss)
                gradients = tape.gradient(loss, self.trainable_variables)
            else:

                def loss_of(logits: tf.Tensor) -> tf.Tensor:
                    losses = self._training_losses(logits, labels, *mixed)
                    return self._scaled(tf.reduce_sum(losses * weights) / global_batch)

                gradients, logits = self.rematerialization.gradients(
                    self._normalized(images),
                    loss_of,
                    self._scaled(tf.constant(1 / parts)),
                    self.trainable_variables,
                    [] if self.unseeded_draws is None else [self.unseeded_draws.state],
                )
                losses = self._training_losses(logits, labels, *mixed)
        self._check_gradients(gradients)
        return gradients, batch_sums(logits, losses, labels, weights)

    def _mixed(self, count: int, *batch: tf.Tensor) -> Tensors:
        """Returns the images of ``count`` parts of a batch, each mixed, and their new targets.

        That is the partners' labels and the fractions, or the teacher's logits of these images.
        """
        images, *targets = batch[:1]
        if self.mixer is not None:
            parts: Any = [batch]
            if count > 1:
                parts = zip(*map(tf.unstack, micro_batches(batch, count)))
            mixes = [self.mixer.mix(*part) for part in parts]
            images, *targets = (tf.concat(tensors, axis=0) for tensors in zip(*mixes))
        return [images, *([self.teacher.logits(images)] if self.teacher is not None else targets)]

    def _check_gradients(self, gradients: Sequence[tf.Tensor | None]) -> None:
        pairs = zip(gradients, self.trainable_variables)
        unused = [name_of(variable) for gradient, variable in pairs if gradient is None]
        if unused:
            raise UserError(
                f"the loss does not depend on {', '.join(unused)}: set trainable = False in the "
                "layers of these variables, and compile again"
            )

    def _pipeline_gradients(
        self,
        pipeline: Pipeline,
        global_batch: tf.Tensor,
        images: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
        *random_numbers: tf.Tensor,
    ) -> tuple[Tensors, tf.Tensor]:
        """Returns the gradients and metric sums of all micro-batches."""
        images, *mixed = self._mixed(self._micro_batches, images, labels, weights, *random_numbers)

        def loss(logits: tf.Tensor, targets: Tensors) -> tf.Tensor:
            labels, weights, *mixed = targets
            losses = self._training_losses(logits, labels, *mixed)
            return self._scaled(tf.reduce_sum(losses * weights) / global_batch)

        with micro_batch.carried(self.replicas_each, self.accumulation_steps):
            step = pipeline.compute(
                self._normalized(images),
                [labels, weights, *mixed],
                loss,
                self._scaled(tf.constant(1.0)),
            )
        by_variable = {
            id(variable): gradient for variable, gradient in zip(pipeline.variables, step.gradients)
        }
        gradients = [by_variable[id(variable)] for variable in self.trainable_variables]
        self._check_gradients(gradients)
        losses = self._training_losses(step.outputs, labels, *mixed)
        return gradients, batch_sums(step.outputs, losses, labels, weights)

    def _image_losses(
        self,
        logits: tf.Tensor,
        labels: tf.Tensor,
        *mixed: tf.Tensor,
        class_weights: np.ndarray | None = None,
    ) -> tf.Tensor:
        return image_losses(
            logits,
            labels,
            *mixed,
            loss=self.image_loss,
            label_smoothing=self.label_smoothing,
            class_weights=class_weights,
            focus=self.focus,
        )

    def _training_losses(
        self, logits: tf.Tensor, labels: tf.Tensor, *mixed: tf.Tensor
    ) -> tf.Tensor:
        if self.teacher is not None:
            return self.teacher.losses(logits, *mixed)
        return self._image_losses(logits, labels, *mixed, class_weights=self.class_weights)

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        return scaled_loss(self.optimizer, loss)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function compiled by XLA."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    # Behind a plain function: a SavedModel traces attributes that are tf.functions.
    return lambda *args: compiled(*args)
