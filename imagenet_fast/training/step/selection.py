"""Training on the images of a batch with the highest loss.

Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers", select images at
random, the more likely the higher their loss; airbench96_faster (Jordan 2025) takes those of the
highest loss, as a smaller network sees them that is trained on the same images. This is the latter.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from imagenet_fast.base.keras_2 import tensorflow_variables
from imagenet_fast.data.on_device import gather
from imagenet_fast.optimizers.loss_scale import scaled_loss, without_all_reduce
from imagenet_fast.optimizers.slots import make_slots, state_of, variables_of
from imagenet_fast.training.step.metric_sums import skipped_sums
from imagenet_fast.training.step.micro_batches import images_in

Batch = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


class Selection:
    """Chooses which images of a replica's part of a batch to train on: those of the highest loss.

    Args:
      fraction: of the images, rounded to at least one; 1: all.
      proxy: chooses by its own loss, and is trained with the network; None: the network's loss.
    """

    def __init__(self, fraction: float = 1.0, proxy: Proxy | None = None) -> None:
        self.proxy = proxy
        self._fraction = fraction

    @property
    def selects(self) -> bool:
        """Whether it leaves out any images."""
        return self._fraction < 1

    @property
    def variables(self) -> list[tf.Variable]:
        """What changes in a step besides the network's own variables."""
        proxy = self.proxy
        if proxy is None:
            return []
        return [*tensorflow_variables(proxy.network.variables), *variables_of(proxy.optimizer)]

    @property
    def checkpoint(self) -> dict[str, tf.train.Checkpoint]:
        """What must be saved to resume, by its name in checkpoints."""
        proxy = self.proxy
        if proxy is None:
            return {}
        return {
            "proxy": tf.train.Checkpoint(
                weights=tensorflow_variables(proxy.network.variables),
                optimizer=state_of(proxy.optimizer),
            )
        }

    def make_slots(self) -> None:
        """Makes the optimizer's variables, otherwise made in its first step."""
        if self.proxy is not None:
            make_slots(self.proxy.optimizer, self.proxy.network.trainable_variables)

    def choose(
        self,
        batch: Batch,
        network_losses: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
        iterations: tf.Variable,
    ) -> tuple[Batch, tf.Tensor | float]:
        """Returns the part of a batch to train on, and the metric sums of the rest.

        To be called in a replica. The rest counts only as far as it was unreadable, since training
        metrics are of the chosen images.

        Args:
          batch: images [batch, height, width, 3], labels int32 [batch, ...] and weights float32
            [batch]; 0 for images that do not count.
          network_losses: takes images and labels and returns the network's losses in training mode,
            float32 [batch].
          iterations: weight updates of the run so far.
        """
        if not self.selects:
            return batch, 0.0
        images, labels, weights = batch
        if self.proxy is None:
            losses = network_losses(images, labels)
        else:
            losses = self.proxy.losses(tf.convert_to_tensor(iterations), *batch, self._fraction)
        places = hardest(losses, weights, self._fraction)
        chosen = gather(images, places), tf.gather(labels, places), tf.gather(weights, places)
        return chosen, skipped_sums(labels, weights) - skipped_sums(*chosen[1:])


class Proxy:
    """A small network that selects the images to train another one on, and is trained with it.

    It is for a single replica. airbench96_faster trains it for a whole run first, and then trains
    the other network in the same order; since the proxy does not depend on the other network, both
    at once take the same steps. It is not a ``tf.Module``, since Keras would count its variables
    among the model's weights.

    Args:
      network: from pixels to float32 logits.
      optimizer: of the network; its learning rates are those of its own updates.
      image_losses: from logits and labels to the loss of each image, float32 [batch].
      every: steps between its updates.
    """

    def __init__(
        self,
        network: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        image_losses: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
        every: int,
    ) -> None:
        self.network, self.optimizer = network, optimizer
        self._image_losses, self._every = image_losses, every

    def losses(
        self,
        step: tf.Tensor,
        images: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
        fraction: float,
    ) -> tf.Tensor:
        """Returns the images' losses in training mode, and trains on the highest if it is due.

        Args:
          step: of the run, from 0; the proxy is updated in those that ``every`` divides.
          images: [batch, height, width, 3], of the network's dtype.
          labels: int32 [batch].
          weights: float32 [batch]; 0 for images that do not count.
          fraction: of the images that are trained on.

        Returns:
          float32 [batch], of the weights before the update.
        """
        return tf.cond(
            tf.equal(step % self._every, 0),
            lambda: self._train(images, labels, weights, fraction),
            lambda: self._losses(images, labels),
        )

    def _losses(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return self._image_losses(self.network(images, training=True), labels)

    def _train(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, fraction: float
    ) -> tf.Tensor:
        variables = self.network.trainable_variables
        with tf.GradientTape() as tape:
            losses = self._losses(images, labels)
            places = hardest(losses, weights, fraction)
            # Batch norm's statistics are of all images, but the loss is of these.
            loss = scaled_loss(self.optimizer, tf.reduce_mean(tf.gather(losses * weights, places)))
        with without_all_reduce(self.optimizer) as update:
            update(tape.gradient(loss, variables), variables)
        return losses


def hardest(losses: tf.Tensor, weights: tf.Tensor, fraction: float) -> tf.Tensor:
    """Returns the places of the images with the highest loss, int32 [selected], ascending.

    Args:
      losses: float32 [batch].
      weights: float32 [batch]; images of weight 0 come last.
      fraction: of the images, rounded to at least one.
    """
    # Losses are not negative. NaN, of a diverged network, must not select images of weight 0.
    losses = tf.where(tf.math.is_finite(losses), losses, losses.dtype.max)
    losses = tf.where(weights > 0, losses, -1.0)
    _, places = tf.math.top_k(losses, images_in(losses, fraction), sorted=False)
    return tf.sort(places)
