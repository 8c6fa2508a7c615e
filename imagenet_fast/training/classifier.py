"""A Keras model that trains as the large-batch papers do; ``model.fit`` is its training loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tf_keras as keras

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.data.on_device import ImagesOnDevice
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.one_call import (
    assign_everywhere,
    assign_own,
    first_copies_read,
    one_call,
    own_values,
)
from imagenet_fast.layers import Dropout
from imagenet_fast.optimizers.lookahead import Lookahead
from imagenet_fast.optimizers.shadow_weights import ShadowWeights
from imagenet_fast.optimizers.slots import make_slots, unwrapped
from imagenet_fast.optimizers.weight_average import WeightAverage
from imagenet_fast.pipeline_parallel.pipeline import Pipeline
from imagenet_fast.pipeline_parallel.stage_sums import StageSums
from imagenet_fast.training.metric_sums import NAMES, MetricSums, batch_sums
from imagenet_fast.training.mix import Mixer
from imagenet_fast.training.views import mean_over_views

Tensors = list[tf.Tensor]


class Classifier(keras.Model):
    """A functional model from pixels to float32 logits, with a training step of its own.

    Where Keras' step differs from what the papers do, this one follows the papers:

    * the loss is the sum over images divided by the *global* batch, in float32, so that one device
      and any number of replicas take the same step;
    * micro-batches are accumulated inside the step: one sum over replicas, one update, also of
      batch norm's moving averages;
    * gradients and metrics are summed together, before the optimizer clips or scales;
    * the loss reported is without loss scale, regularization or rounding to float16;
    * XLA compiles the whole step of one device; of several, each replica's forward and backward
      pass, but not the update, which their strategies cannot compile.

    Batches are ``(images, labels)`` or ``(images, labels, weights)``: of the input's dtype
    [batch, height, width, 3], integer [batch] or [batch, 1], and float of the same. Images of
    weight 0 do not count; negative labels mark padding. Metrics: ``loss``, ``top1``, ``top5``
    (fractions), ``examples`` (images that counted: the sum of their weights), ``skipped`` (images
    of weight 0). Where images are mixed, the loss in training is that of both labels, and the
    accuracies are those of the image's own.

    Where a moving average of the weights is kept, ``evaluate``, ``predict``, ``save`` and
    ``save_weights`` work with it; ``train_on_batch``, ``test_on_batch``, ``predict_on_batch`` and
    ``get_weights`` with the weights themselves.

    Args:
      inputs: the functional model's input.
      outputs: its logits, float32 [batch, classes].
      label_smoothing: probability spread evenly over all classes.
      mixer: mixes the images of each micro-batch in training; None: they are not mixed.
      views: of an image, over which evaluation takes the mean logits; see ``mean_over_views``.
      accumulation_steps: micro-batches in each replica's share of a step.
      pipeline: of the layers between the normalization of pixels and the logits, which is to train
        and to evaluate them; None: the model itself does.
      xla: whether XLA compiles the step, or what it can of it.
      config: what the model was made from, if it was; ``export`` needs it.
      labels: the name of each class; ``export`` puts them into its answers.
      name: of the model.

    Attributes:
      steps_per_epoch: what ``fit`` takes where it is not told; None: the whole data set.
      epochs: what ``fit`` takes where it is not told.
      total_steps: of the whole recipe, which ``fit`` takes where that is shorter than an epoch;
        None: there is no recipe.
      all_reduce: how gradients and metrics are summed over replicas; None: as the strategy does.
      weight_average: the moving average of the weights; None: it keeps none.
      lookahead: slow copies, to which the weights are pulled back; None: they are not.
      training_images: makes the batches where they are not in the data that ``fit`` is given.
      validation_images: the same for ``evaluate``.
    """

    def __init__(
        self,
        inputs: Any,
        outputs: Any,
        *,
        label_smoothing: float = 0.0,
        mixer: Mixer | None = None,
        views: str = "none",
        accumulation_steps: int = 1,
        pipeline: Pipeline | None = None,
        xla: bool = False,
        config: Config | None = None,
        labels: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        self.label_smoothing = label_smoothing
        self.mixer = mixer
        self.views = views
        self.accumulation_steps = accumulation_steps
        self.pipeline = pipeline
        self.config = config
        self.labels = tuple(labels)
        self.steps_per_epoch: int | None = None
        self.epochs = 1
        self.total_steps: int | None = None
        self.training_images: ImagesOnDevice | None = None
        self.validation_images: ImagesOnDevice | None = None
        self.metric_sums = MetricSums()
        self.all_reduce: AllReduce | StageSums | None = None
        self.weight_average: WeightAverage | None = None
        self.lookahead: Lookahead | None = None
        # Each replica returns sums over all replicas, of which Keras would take the sum.
        self.distribute_reduction_method = "first"
        self._xla = xla
        strategy = self.distribute_strategy
        self._average_statistics = one_call(strategy, self._average_own_statistics)
        for counter in (self._train_counter, self._test_counter, self._predict_counter):
            # Keras sets them to 0 before it begins, which it would do replica by replica.
            own = one_call(strategy, functools.partial(assign_own, [counter]))
            counter.assign = functools.partial(_set_counter, own)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Keras' ``compile``, of which only the optimizer matters."""
        # Weights mark images that do not count; Keras would warn of what it does not use them for.
        super().compile(*args, **{"weighted_metrics": [], **kwargs})
        # Not in tf.functions without need: out of them, replicas of a MirroredStrategy could not
        # share batch norm.
        self._forward_backward, self._step = self._gradients, self._take_step
        # Made anew, since their graphs depend on the optimizer and on which layers are trainable.
        if self._xla and self.distribute_strategy.num_replicas_in_sync == 1:
            self._step = _compiled(self._take_step)
        elif self._xla:
            self._forward_backward = _compiled(self._gradients)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        *args: Any,
        steps_per_epoch: int | None = None,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Keras' ``fit``; by default of the recipe's epochs and, of endless data, of its steps.

        Raises:
          UserError: if Keras would leave out something that is asked for.
        """
        self._check_fit(x, **kwargs)
        if _is_distributed(kwargs.get("validation_data")):
            kwargs.setdefault("validation_steps", _steps_of(kwargs["validation_data"]))
        if steps_per_epoch is None and _is_endless(x):
            steps_per_epoch = self.steps_per_epoch
            if epochs is None and steps_per_epoch is not None and self.total_steps is not None:
                steps_per_epoch = min(steps_per_epoch, self.total_steps)
        return super().fit(
            x,
            y,
            batch_size,
            self.epochs if epochs is None else epochs,
            *args,
            steps_per_epoch=steps_per_epoch,
            **kwargs,
        )

    def _check_fit(
        self, x: Any, class_weight: Any = None, callbacks: Any = None, **others: Any
    ) -> None:
        if class_weight and _is_distributed(x):
            raise UserError(
                "class_weight is not for data that is distributed already, as make_dataset's: map "
                "(images, labels, weights) of your own tf.data.Dataset"
            )
        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        backup = any(isinstance(own, keras.callbacks.BackupAndRestore) for own in given)
        if backup and any(self._copies()):
            raise UserError(
                "BackupAndRestore does not keep the moving average of the weights or the slow "
                "weights of lookahead: use imagenet_fast.train, whose checkpoints do"
            )

    def evaluate(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Keras' ``evaluate``, of the same model on all replicas."""
        if _is_distributed(x):
            kwargs.setdefault("steps", _steps_of(x))
        with self.evaluated_weights():
            return super().evaluate(x, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Keras' ``predict``, of the model that ``evaluate`` evaluates.

        Of images that ``make_dataset`` gives for evaluation, the last rows may be padding, of label
        -1.
        """
        if _is_distributed(x):
            kwargs.setdefault("steps", _steps_of(x))
        with self.evaluated_weights():
            return super().predict(x, *args, **kwargs)

    def make_train_function(self, force: bool = False) -> Callable[..., Any]:
        """Keras' ``make_train_function``."""
        # Made in the first step, they would have it traced a second time.
        self.make_slots()
        return super().make_train_function(force)

    def make_slots(self) -> None:
        """Makes the optimizer's variables, which it otherwise makes in its first step."""
        with self.distribute_strategy.scope():
            make_slots(self.optimizer, self.trainable_variables)

    def train_step(self, data: Any) -> Mapping[str, tf.Tensor]:
        """Takes one step on this replica's share of the global batch."""
        return self._step(data)

    def test_step(self, data: Any) -> Mapping[str, tf.Tensor]:
        """Counts one batch, summed over the replicas."""
        images, labels, weights = self.batch(data, "validation")
        logits = self.logits(images)
        sums = batch_sums(logits, self._cross_entropy(logits, labels), labels, weights)
        context = tf.distribute.get_replica_context()
        self.metric_sums.add(context.all_reduce(tf.distribute.ReduceOp.SUM, sums))
        return self.metric_sums.results()

    def batch(self, data: Any, split: str) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the images, labels and weights of a replica's part of a step.

        Args:
          data: what ``make_dataset`` gives: them, or the number of the step for which they are made
            here.
          split: ``train`` or ``validation``.
        """
        if not _is_step(data):
            return _unpack(data)
        images = {"train": self.training_images, "validation": self.validation_images}[split]
        if images is None:
            raise UserError(
                "the data hold numbers of steps in place of images, as with data_on_device, but "
                f"this model has no {split} images: build it with the Config of the data"
            )
        context = tf.distribute.get_replica_context()
        return images.batch(data["step"], context.replica_id_in_sync_group)

    def gradients(self, data: Any) -> tuple[Tensors, tf.Tensor]:
        """Returns the gradients of a replica's part of a step, and the sums of its metrics.

        To be called in a replica, of whose batch norm and dropout it changes the state, as each
        step does.

        Args:
          data: as in :meth:`batch`.
        """
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group
        batch = self.batch(data, "train")
        images = tf.shape(batch[0])[0]
        global_batch = tf.cast(images * context.num_replicas_in_sync, tf.float32)
        own_data = not _is_step(data) and batch[0].shape[0] is None
        if own_data and context.num_replicas_in_sync > 1:
            # Keras gives replicas unequal parts of a last batch that is smaller.
            global_batch = context.all_reduce(
                tf.distribute.ReduceOp.SUM, tf.cast(images, tf.float32)
            )
        drawn: tuple[tf.Tensor, ...] = ()
        if self.mixer is not None:
            step = self.optimizer.iterations.read_value()
            drawn = (self.mixer.draw(images, step, replica),)
        return self._accumulate(global_batch, *batch, *drawn)

    def update(self, gradients: Tensors) -> None:
        """Updates the weights, and the copies that follow them; to be called in a replica.

        Args:
          gradients: of the trainable variables, summed over the replicas, in the loss scale if
            there is one.
        """
        step = self.optimizer.iterations.read_value()
        if isinstance(self.optimizer, keras.mixed_precision.LossScaleOptimizer):
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        self._apply(gradients)
        if self.lookahead is not None:
            self.lookahead.update(step + 1)
        if self.weight_average is not None:
            self.weight_average.update(
                step % self.steps_per_epoch if self.steps_per_epoch else step
            )

    def predict_step(self, data: Any) -> tf.Tensor:
        """Returns the classes' probabilities, float32 [batch, classes]."""
        if _is_step(data):
            images, _, _ = self.batch(data, "validation")
        else:
            images = keras.utils.unpack_x_y_sample_weight(data)[0]
        return tf.nn.softmax(self.logits(images))

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        """Returns what evaluation goes by: the mean logits of the views of each image.

        Args:
          images: of the input's dtype [batch, height, width, 3].
        """
        return mean_over_views(self._evaluate_once, images, self.views)

    def _evaluate_once(self, images: tf.Tensor) -> tf.Tensor:
        if self.pipeline is None:
            return self(images, training=False)
        return self.pipeline(self._normalized(images), training=False)

    def _normalized(self, images: tf.Tensor) -> tf.Tensor:
        """Returns what the pipeline takes."""
        return self.get_layer("normalize")(images)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras' ``save``, of the network that ``evaluate`` evaluates, from pixels to logits.

        ``models.load`` reads a ``.keras`` file, as a plain Keras model. The training step is
        ``build_model``'s; a run that is to go on needs the checkpoints of ``train``.
        """
        with self.distribute_strategy.scope():
            network = keras.Model(self.inputs, self.outputs, name=self.name)
        with self.evaluated_weights():
            network.save(filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras' ``save_weights``, of those that ``evaluate`` works with."""
        with self.evaluated_weights():
            super().save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Keras' ``load_weights``; a moving average begins anew with what is loaded."""
        found = super().load_weights(filepath, *args, **kwargs)
        self.restart_copies()
        return found

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Keras' ``set_weights``; a moving average begins anew with what is set."""
        variables = self.weights
        if len(weights) != len(variables):
            raise UserError(f"{len(weights)} arrays for the model's {len(variables)} weights")
        assign_everywhere(variables, weights)
        self.restart_copies()

    def get_config(self) -> dict[str, Any]:
        """Keras asks for it in functions that cannot save this model."""
        raise UserError("save the model by its own method, model.save(path), or by export")

    @property
    def metrics(self) -> list[Any]:
        """What Keras knows of the numbers that a step returns, which are of all images so far.

        Without these, its progress bar would show the means of those of each step.
        """
        return [_Metric(name, self.metric_sums) for name in NAMES]

    def average_batch_norm_statistics(self) -> None:
        """Gives all replicas the mean of their moving averages of batch norm.

        Each replica keeps its own between calls, and Keras would evaluate with each one's and save
        the first's. To be called outside the training step, by all workers.
        """
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return
        self._average_statistics()
        for copies in self._copies():  # they have statistics of their own
            with copies.in_use():
                self._average_statistics()

    @contextlib.contextmanager
    def averaged_batch_norm_statistics(self) -> Iterator[None]:
        """The same, and inside, the first replica's are read as those of all, which they are."""
        self.average_batch_norm_statistics()
        with first_copies_read(self._statistics()):
            yield

    @contextlib.contextmanager
    def preserved_state(self) -> Iterator[None]:
        """What layers compute inside leaves no trace in batch norm's averages and dropout's counts.

        To be used outside of replicas.
        """
        strategy = self.distribute_strategy
        states = [layer.state for layer in self.submodules if isinstance(layer, Dropout)]
        variables = [*self._statistics(), *states]

        @tf.function(autograph=False)
        def read() -> Any:
            return strategy.run(lambda: own_values(variables))

        @tf.function(autograph=False)
        def restore(before: Any) -> None:  # each replica's own
            strategy.run(lambda values: assign_own(variables, values), args=(before,))

        before = read()
        try:
            yield
        finally:
            restore(before)

    def keep_weight_average(self, decay: float, every: int = 1) -> None:
        """Keeps a moving average of the weights, with which ``evaluate`` then works.

        To be called in the strategy's scope, before training.

        Args:
          decay: share of the average that a step keeps, in [0, 1).
          every: steps from one update to the next, counted anew in each epoch.
        """
        self.weight_average = WeightAverage(self.weights, decay, every)

    def look_ahead(self, decay: float, every: int, total_steps: int) -> None:
        """Has the weights pulled back to slow copies of themselves; see ``Lookahead``.

        To be called in the strategy's scope, before training.

        Args:
          decay: share of the slow copies that a step at the end keeps, in [0, 1).
          every: steps from one pull to the next.
          total_steps: of the training.
        """
        self.lookahead = Lookahead(self.weights, decay, every, total_steps)

    def restart_copies(self) -> None:
        """Has the copies that follow the weights begin at the present ones; outside of replicas."""
        for copies in self._copies():
            copies.restart()

    def _copies(self) -> list[ShadowWeights]:
        return [own for own in (self.weight_average, self.lookahead) if own is not None]

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model has its averaged weights, if it keeps them; afterwards its own."""
        if self.weight_average is None:
            return contextlib.nullcontext()
        return self.weight_average.in_use()

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Inside, the model is the one to evaluate and to save, on all replicas the same.

        It has its averaged weights, and the mean of the replicas' statistics of batch norm, which
        it keeps afterwards. To be called outside the training step, by all workers.
        """
        with self.averaged_batch_norm_statistics(), self.averaged_weights():
            yield

    def reset_metrics(self) -> None:
        """Keras' ``reset_metrics``: starts counting again, for all metrics at once."""
        self.metric_sums.reset()

    def _take_step(self, data: Any) -> Mapping[str, tf.Tensor]:
        gradients, sums = self.gradients(data)
        *gradients, sums = self._sum_over_replicas(gradients, sums)
        self.update(gradients)
        self.metric_sums.add(sums)
        return self.metric_sums.results()

    def _sum_over_replicas(self, gradients: Tensors, sums: tf.Tensor) -> Tensors:
        if self.all_reduce is None:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, sums])
        # The sums count images: they are not to be rounded, whatever becomes of the gradients.
        return self.all_reduce(gradients, [sums], variables=self.trainable_variables)

    def _apply(self, gradients: Tensors) -> None:
        """Updates the weights by gradients that are summed over the replicas."""
        pairs = zip(gradients, self.trainable_variables)
        if isinstance(
            unwrapped(self.optimizer), keras.optimizers.legacy.Optimizer
        ):  # those of TensorFlow Addons
            self.optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)
        else:
            self.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

    def _average_own_statistics(self) -> None:
        """One replica's part in averaging."""
        statistics = self._statistics()
        if not statistics:
            return
        context = tf.distribute.get_replica_context()
        assign_own(
            statistics, context.all_reduce(tf.distribute.ReduceOp.MEAN, own_values(statistics))
        )

    def _statistics(self) -> list[tf.Variable]:
        """Returns the moving averages of batch norm."""
        return [
            variable
            for layer in self.submodules
            if isinstance(layer, keras.layers.BatchNormalization)
            for variable in (layer.moving_mean, layer.moving_variance)
        ]

    def _accumulate(self, global_batch: tf.Tensor, *batch: tf.Tensor) -> tuple[Tensors, tf.Tensor]:
        """Returns the gradients and sums of this replica's share, micro-batch by micro-batch."""
        if self.pipeline is not None:
            return self._through_pipeline(self.pipeline, global_batch, *batch)
        if self.accumulation_steps == 1:
            return self._forward_backward(global_batch, *batch)
        parts = self._parts(batch)
        statistics = self._statistics()
        before = own_values(statistics)

        def add(step: tf.Tensor, *so_far: Any) -> tuple[Any, ...]:
            # Each moves them from where they were, as replicas do: the mean is what the step does.
            assign_own(statistics, before)
            new, new_sums = self._forward_backward(global_batch, *(part[step] for part in parts))
            moves = [value - own for value, own in zip(own_values(statistics), before)]
            return step + 1, *tf.nest.map_structure(tf.add, so_far, (new, new_sums, moves))

        zeros = [tf.zeros(variable.shape) for variable in self.trainable_variables]
        none = [tf.zeros(variable.shape) for variable in statistics]
        _, gradients, sums, moves = tf.while_loop(
            lambda step, *_: step < self.accumulation_steps,
            add,
            (tf.constant(0), zeros, tf.zeros_like(self.metric_sums.variable), none),
            parallel_iterations=1,
        )
        assign_own(
            statistics,
            [own + move / self.accumulation_steps for own, move in zip(before, moves)],
        )
        return gradients, sums

    def _parts(self, batch: Sequence[tf.Tensor]) -> Tensors:
        """Returns the micro-batches of each tensor: [accumulation_steps, images, ...]."""
        parts, images = [], batch[0].shape[0]
        unequal = (
            f"cannot be split into accumulation_steps={self.accumulation_steps} equal "
            "micro-batches: give batches that can be, or leave out a last one that cannot "
            "(drop_remainder=True)"
        )
        if images is not None and images % self.accumulation_steps:
            raise UserError(f"a replica's {images} images {unequal}")
        if images is None:
            found = tf.shape(batch[0])[0]
            equal = tf.equal(found % self.accumulation_steps, 0)
            told = tf.debugging.Assert(equal, [f"images that {unequal}; a replica has", found])
            with tf.control_dependencies([told]):
                batch = [tf.identity(whole) for whole in batch]
        for whole in batch:
            shape = tf.concat([[self.accumulation_steps, -1], tf.shape(whole)[1:]], 0)
            parts.append(tf.reshape(whole, shape))
            parts[-1].set_shape([self.accumulation_steps, None, *whole.shape[1:]])
        return parts

    def _gradients(
        self,
        global_batch: tf.Tensor,
        images: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
        *drawn: tf.Tensor,
    ) -> tuple[Tensors, tf.Tensor]:
        """Returns float32 gradients of a micro-batch's part of the loss, and its sums.

        ``drawn`` is for the mixer, if there is one.
        """
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        mixed: Sequence[tf.Tensor] = ()
        if self.mixer is not None:
            images, *mixed = self.mixer.mix(images, labels, weights, *drawn)
        with tf.GradientTape() as tape:
            logits = self(images, training=True)
            losses = self._image_losses(logits, labels, *mixed)
            loss = tf.reduce_sum(losses * weights) / global_batch
            if self.losses:  # regularization, of which each micro-batch adds its share
                loss += tf.add_n(self.losses) / (replicas * self.accumulation_steps)
            loss = self._scaled(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self._check_gradients(gradients)
        return gradients, batch_sums(logits, losses, labels, weights)

    def _check_gradients(self, gradients: Sequence[tf.Tensor | None]) -> None:
        pairs = zip(gradients, self.trainable_variables)
        lost = [variable.name for gradient, variable in pairs if gradient is None]
        if lost:
            raise UserError(
                f"the loss does not depend on {', '.join(lost)}: set trainable = False in the "
                "layers of these variables, and compile again"
            )

    def _through_pipeline(
        self,
        pipeline: Pipeline,
        global_batch: tf.Tensor,
        images: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
        *drawn: tf.Tensor,
    ) -> tuple[Tensors, tf.Tensor]:
        """Returns the same of all micro-batches."""
        mixed: Sequence[tf.Tensor] = ()
        if self.mixer is not None:
            parts = self._parts([images, labels, weights, *drawn])
            own = [self.mixer.mix(*part) for part in zip(*map(tf.unstack, parts))]
            images, *mixed = (tf.concat(found, axis=0) for found in zip(*own))

        def loss(logits: tf.Tensor, targets: Tensors) -> tf.Tensor:
            labels, weights, *mixed = targets
            losses = self._image_losses(logits, labels, *mixed)
            return self._scaled(tf.reduce_sum(losses * weights) / global_batch)

        step = pipeline.compute(
            self._normalized(images),
            [labels, weights, *mixed],
            loss,
            self._scaled(tf.constant(1.0)),
        )
        found = {own.ref(): gradient for own, gradient in zip(pipeline.variables, step.gradients)}
        gradients = [found[variable.ref()] for variable in self.trainable_variables]
        losses = self._image_losses(step.outputs, labels, *mixed)
        return gradients, batch_sums(step.outputs, losses, labels, weights)

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss in the optimizer's loss scale, if it has one."""
        if isinstance(self.optimizer, keras.mixed_precision.LossScaleOptimizer):
            return self.optimizer.get_scaled_loss(loss)
        return loss

    def _image_losses(
        self,
        logits: tf.Tensor,
        labels: tf.Tensor,
        partners: tf.Tensor | None = None,
        shares: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns each image's loss, float32 [batch]; of a mixed one, that of both labels."""
        losses = self._cross_entropy(logits, labels)
        if partners is None or shares is None:
            return losses
        return shares * losses + (1 - shares) * self._cross_entropy(logits, partners)

    def _cross_entropy(self, logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Returns each image's cross-entropy, float32 [batch]; padding counts as class 0."""
        logits = tf.cast(logits, tf.float32)
        labels = tf.maximum(labels, 0)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        if not self.label_smoothing:
            return losses
        # The cross-entropy against (1 - s) * one-hot + s / classes.
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        return (1 - self.label_smoothing) * losses + self.label_smoothing * uniform


class _Metric(NamedTuple):
    """A name among the metric sums."""

    name: str
    metric_sums: MetricSums

    def reset_state(self) -> None:
        """Starts counting again; Keras calls it before each epoch and each evaluation."""
        self.metric_sums.reset()

    def result(self) -> tf.Tensor:
        """Returns the number so far, float32."""
        return self.metric_sums.results()[self.name]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function compiled by XLA."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    # Behind a plain function: a SavedModel traces attributes that are tf.functions.
    return lambda *args: compiled(*args)


def _set_counter(assign: Callable[..., None], value: int) -> None:
    assign([tf.constant(value, tf.int64)])


def _is_step(data: Any) -> bool:
    """Returns whether a batch is to be made here, of which only the number has come."""
    return isinstance(data, Mapping) and set(data) == {"step"}


def _steps_of(dataset: Any) -> int | None:
    """Returns the steps in which ``make_dataset``'s images are each evaluated once."""
    return getattr(dataset, "evaluation_steps", None)


def _is_distributed(data: Any) -> bool:
    return isinstance(data, tf.distribute.DistributedDataset)


def _is_endless(data: Any) -> bool:
    """Whether an epoch would not end without a number of steps."""
    if isinstance(data, tf.data.Dataset):
        return data.cardinality().numpy() == tf.data.INFINITE_CARDINALITY
    return _is_distributed(data)


def _unpack(data: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    images, labels, weights = keras.utils.unpack_x_y_sample_weight(data)
    labels = _one_each("labels are class numbers", labels)
    weights = tf.ones_like(labels) if weights is None else _one_each("weights are", weights)
    return images, tf.cast(labels, tf.int32), tf.cast(weights, tf.float32)


def _one_each(what: str, values: tf.Tensor) -> tf.Tensor:
    """Returns what there is of each image, [batch], of [batch] or [batch, 1]."""
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 2 and values.shape[1] == 1:
        return tf.squeeze(values, axis=1)
    if values.shape.rank != 1:
        raise UserError(f"{what} [batch], but got {values.shape}: one of each image")
    return values
