"""Knowledge distillation: a network learns what a trained one, the teacher, makes of the images.

As in Beyer et al. 2022, "Knowledge distillation: A good teacher is patient and consistent": the
teacher sees the same crops, flips and mixtures of images as the student, in each step, and the loss
is the Kullback-Leibler divergence alone. Labels have no part in it.
"""

from __future__ import annotations

import dataclasses

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A trained network in inference mode, which is neither trained nor saved with the student.

    Attributes:
      model: from pixels to float32 logits, made in the strategy's scope.
      temperature: by which the logits of both are divided.
      name: what it is, for people.
      checksum: of its weights.
    """

    model: keras.Model
    temperature: float
    name: str
    checksum: int

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        """Returns the teacher's logits, float32 [batch, classes], without a gradient.

        Args:
          images: uint8 [batch, height, width, 3], as the student sees them; resized bilinearly if
            the teacher takes images of another size.
        """
        size = self.model.input_shape[1:3]
        if None not in size and size != tuple(images.shape[1:3]):
            pixels = tf.round(tf.image.resize(images, size))
            images = tf.cast(pixels, images.dtype)
        return tf.stop_gradient(self.model(images, training=False))

    def losses(self, logits: tf.Tensor, teacher_logits: tf.Tensor) -> tf.Tensor:
        """Returns the divergence of the student from the teacher for each image, float32 [batch].

        It is ``temperature**2 * sum(p * (log(p) - log(q)))`` over the classes, with the
        probabilities p of the teacher and q of the student. The square keeps the size of gradients
        (Hinton et al. 2015, "Distilling the knowledge in a neural network", section 2.1).

        Args:
          logits: of the student, [batch, classes].
          teacher_logits: float32 [batch, classes].
        """
        student = tf.nn.log_softmax(tf.cast(logits, tf.float32) / self.temperature)
        teacher = tf.nn.log_softmax(teacher_logits / self.temperature)
        divergence = tf.reduce_sum(tf.exp(teacher) * (teacher - student), axis=-1)
        return self.temperature**2 * divergence
