"""A Keras image classifier: ``fit``, ``evaluate``, ``predict`` and saving, with recipe defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.config import Config
from imagenet_fast.data.dataset import devices_without_tuners
from imagenet_fast.distribute.one_call import assign_everywhere
from imagenet_fast.models.custom import CustomModel, use_restored_statistics
from imagenet_fast.training.step.training_step import TrainingStep


class Classifier(TrainingStep):
    """A functional model from pixels to float32 logits that trains as the large-batch papers do.

    :class:`imagenet_fast.training.step.training_step.TrainingStep` is its training step.

    Batches are ``(images, labels)`` or ``(images, labels, weights)``: images of the input's dtype
    [batch, height, width, 3], labels integer and weights float, both [batch] or [batch, 1]. Images
    of weight 0 do not count; negative labels mark padding. With other losses than cross-entropy,
    labels may be [batch, classes], 1 for each class of an image and 0 for others; a prediction is
    then right if it is one of the image's classes. Metrics: ``loss``, ``top1``, ``top5``
    (fractions), ``examples`` (sum of the weights), ``skipped`` (images of weight 0). With mixup or
    cutmix, the training loss is that of both labels, and the accuracies are those of the image's
    first label. With a ``selection``, they are those of the images that it chooses.

    With a moving average of the weights, ``evaluate``, ``predict``, ``save`` and ``save_weights``
    use it; ``train_on_batch``, ``test_on_batch``, ``predict_on_batch`` and ``get_weights`` use the
    weights themselves.

    Args:
      inputs: the functional model's input.
      outputs: its logits, float32 [batch, classes].
      config: from which the model was built; ``export`` needs it.
      labels: the name of each class; ``export`` adds them to predictions.
      custom: the user's own network, if ``config.model`` stands for one; ``export`` makes it again.
      **options: the other arguments of ``TrainingStep``.

    Attributes:
      epochs: default of ``fit``.
      total_steps: steps of the whole recipe, ``fit``'s default if fewer than an epoch's; None: no
        recipe.
    """

    def __init__(
        self,
        inputs: Any,
        outputs: Any,
        *,
        config: Config | None = None,
        labels: Sequence[str] = (),
        custom: CustomModel | None = None,
        **options: Any,
    ) -> None:
        super().__init__(inputs, outputs, **options)
        self.config = config
        self.labels = tuple(labels)
        # In a lambda: Keras would track a model as a part of this one.
        self.custom = lambda: custom
        self.epochs = 1
        self.total_steps: int | None = None

    @devices_without_tuners()
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
        """Keras' ``fit``; by default for the recipe's epochs and, on endless data, its steps.

        Raises:
          UserError: if Keras would ignore an argument.
        """
        x = _distributed(x)
        if "validation_data" in kwargs:
            kwargs["validation_data"] = _distributed(kwargs["validation_data"])
        self._check_fit(x, **kwargs)
        if _is_distributed(kwargs.get("validation_data")):
            kwargs.setdefault("validation_steps", _evaluation_steps(kwargs["validation_data"]))
        if not args and (_is_distributed(x) or isinstance(x, tf.data.Dataset)):
            kwargs.setdefault("shuffle", False)  # its default is for arrays, as Keras 3 warns
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
                "class_weight does not work with make_dataset's data: give class_weights, as in "
                "build_model(config.replace(class_weights='balanced')), or the name of a JSON file "
                'of weights by class, {"cat": 2}'
            )
        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        backup = any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in given)
        if backup and (self._shadow_weights() or self.selection.variables):
            raise UserError(
                "BackupAndRestore does not save the moving average of the weights, lookahead's "
                "slow weights or the proxy: use imagenet_fast.train, whose checkpoints do"
            )

    @devices_without_tuners()
    def evaluate(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Keras' ``evaluate``, with the same weights on all replicas."""
        x = _distributed(x)
        if _is_distributed(x):
            kwargs.setdefault("steps", _evaluation_steps(x))
        with self.evaluated_weights():
            return super().evaluate(x, *args, **kwargs)

    @devices_without_tuners()
    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Keras' ``predict``, with the weights that ``evaluate`` uses: probabilities, not logits.

        With ``make_dataset``'s evaluation data of several devices, or of ``data_on_device``, the
        last rows may be padding, of label -1.
        """
        if _is_distributed(x):
            kwargs.setdefault("steps", _evaluation_steps(x))
        with self.evaluated_weights():
            return super().predict(x, *args, **kwargs)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras' ``save``, of the network from pixels to logits with the weights of ``evaluate``.

        ``models.load`` reads a ``.keras`` file as a plain Keras model without this training step,
        whose ``predict`` returns logits.
        To resume a run, use the checkpoints of ``train``.
        """
        with self.distribute_strategy.scope():
            network = keras.Model(self.inputs, self.outputs, name=self.name)
        with self.evaluated_weights():
            network.save(filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras' ``save_weights``, of the weights that ``evaluate`` uses."""
        with self.evaluated_weights():
            super().save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Keras' ``load_weights``; a moving average restarts from the loaded weights."""
        status = super().load_weights(filepath, *args, **kwargs)
        self.restart_shadow_weights()
        return status

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Keras' ``set_weights``; a moving average restarts from the new weights."""
        variables = self.weights
        if len(weights) != len(variables):
            raise UserError(f"{len(weights)} arrays for the model's {len(variables)} weights")
        assign_everywhere(variables, weights)
        use_restored_statistics(self)
        self.restart_shadow_weights()

    def get_config(self) -> dict[str, Any]:
        """Raises: Keras calls it in functions that cannot save this model."""
        raise UserError("save the model by its own method, model.save(path), or by export")


def _distributed(data: Any) -> Any:
    """Returns ``make_dataset``'s data with placeholders, and without end in training."""
    return getattr(data, "distributed", data)


def _evaluation_steps(dataset: Any) -> int | None:
    """Returns the steps in which ``make_dataset``'s data has each image once."""
    return getattr(dataset, "evaluation_steps", None)


def _is_distributed(data: Any) -> bool:
    return isinstance(data, tf.distribute.DistributedDataset)


def _is_endless(data: Any) -> bool:
    """Returns whether an epoch has no end unless its steps are given."""
    if isinstance(data, tf.data.Dataset):
        return data.cardinality().numpy() == tf.data.INFINITE_CARDINALITY
    return _is_distributed(data)
