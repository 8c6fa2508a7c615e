"""Training on the images of a batch with the highest loss.

Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers", select images at
random, the more likely the higher their loss; airbench96_faster (Jordan 2025) takes those of the
highest loss, as a smaller network sees them that is trained on the same images. This is the latter.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from imagenet_fast.optimizers.loss_scale import apply_gradients, scaled_loss
from imagenet_fast.optimizers.slots import make_slots
from imagenet_fast.training.step.losses import image_losses
from imagenet_fast.training.step.micro_batches import images_in


class Proxy:
    """A small network that selects the images to train another one on, and is trained with it.

    It is for a single replica. airbench96_faster trains it for a whole run first, and then trains
    the other network in the same order; since the proxy does not depend on the other network, both
    at once take the same steps. It is not a ``tf.Module``, since Keras would count its variables
    among the model's weights.

    Args:
      network: from pixels to float32 logits.
      optimizer: of the network; its learning rates are those of its own updates.
      every: steps between its updates.
      loss: of an image, see ``image_losses``.
      label_smoothing: of its loss.

    Attributes:
      network: see above.
      optimizer: see above.
    """

    def __init__(
        self,
        network: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        *,
        every: int = 1,
        loss: str = "cross_entropy",
        label_smoothing: float = 0.0,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self._every = every
        self._loss = loss
        self._label_smoothing = label_smoothing

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """What must be saved to resume."""
        return tf.train.Checkpoint(network=self.network, optimizer=self.optimizer)

    def make_slots(self) -> None:
        """Makes the optimizer's variables, otherwise made in its first step."""
        make_slots(self.optimizer, self.network.trainable_variables)

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
        logits = self.network(images, training=True)
        return image_losses(logits, labels, loss=self._loss, label_smoothing=self._label_smoothing)

    def _train(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, fraction: float
    ) -> tf.Tensor:
        variables = self.network.trainable_variables
        with tf.GradientTape() as tape:
            losses = self._losses(images, labels)
            places = hardest(losses, weights, fraction)
            # Batch norm's statistics are of all images, but the loss is of these.
            loss = scaled_loss(self.optimizer, tf.reduce_mean(tf.gather(losses * weights, places)))
        apply_gradients(self.optimizer, tape.gradient(loss, variables), variables)
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
